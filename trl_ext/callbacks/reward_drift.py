"""Watch the distribution of the reward."""

import math
import re
from dataclasses import dataclass
from typing import Any

from .monitor import AT_LEAST_ONE, POSITIVE, SHARE, Finding, MonitorCallback, evaluation_noise

SHARE_ABOVE = re.compile(r"score_watch/.+/share_above")
# What else moves in a hack: quantities of `trl_ext.callbacks.metrics`, and keys of the logs
WITNESSES = ("entropy", "length")
WITNESS_KEYS = re.compile(r"repetition/(top_phrase_share|repeated|distinct_\d+)|rewards/.+/disagreement")


@dataclass(eq=False, kw_only=True)
class RewardDriftCallback(MonitorCallback):
    """
    Alert when the mean or the spread of the reward moves far from where it was in the first scores, the baseline.

    Reinforcement learning is meant to raise the mean, so a rise is measured in σ of *single* scores, and a rise alone
    only warns. The monitor acts if one of its witnesses moved, too: entropy, length, repetition, disagreement of an
    ensemble, or gold, a score that training never sees. A fall of the mean, a collapsed spread and too many scores
    above a bound only warn.

    >>> trainer.add_callback(RewardDriftCallback(sigmas=2, action="stop"))

    Args:
        sigmas: alert when the mean rises by more than this, in σ of the baseline.
        drop_sigmas: alert when the mean falls by more than this, in σ of the baseline.
        std: alert when the spread is below this part of the baseline's σ.
        share_above: alert when the share of scores above the bound of [`~trl_ext.rewards.ScoreWatch`] is larger than
            this, if that watch is in use.
        window: number of scores after which the baseline no longer changes.
        minimum: number of scores in the baseline before the reward is compared with it.
        baseline: mean and σ to use in place of the first scores' mean and σ.
        moved: relative change at which a witness counts as moved, from its mean in the first `rollouts` logs.
        gold: key of the gold score in the evaluation's metrics. Gold counts as moved once it is below its value in the
            first evaluation.
        rollouts: number of first logs that a witness is compared with.
        others: see [`MonitorCallback`].
    """

    sigmas: float = 3.0
    drop_sigmas: float = 2.0
    std: float = 0.1
    share_above: float = 0.1
    window: int = 1000
    minimum: int = 100
    baseline: tuple[float, float] | None = None
    moved: float = 0.25
    gold: str = "eval_rewards/gold_judge/mean"
    rollouts: int = 4
    runbook = "reward"
    ranges = {
        "sigmas": POSITIVE,
        "drop_sigmas": POSITIVE,
        "std": SHARE,
        "share_above": SHARE,
        "minimum": ("2 or more", lambda x: x >= 2),
        "moved": POSITIVE,
        "rollouts": AT_LEAST_ONE,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.minimum > self.window:
            raise ValueError(f"`minimum` must be at most `window`, got {self.minimum}, {self.window}")
        if self.baseline is not None and not (len(self.baseline) == 2 and self.baseline[1] > 0):
            raise ValueError(f"`baseline` must be a mean and a σ above 0, got {self.baseline}")

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        if (metrics or {}).get(self.gold) is None:
            return
        self._begin(args, state, {})
        if (value := self._number(self.gold, metrics[self.gold])) is not None:
            noise = evaluation_noise(metrics, self.gold, kwargs.get("eval_dataloader"))
            gold = self.follow("gold", value, first=1, **noise)
            self.memory["gold_fell"] = gold.below(1) is not None

    def watch(self, logs):
        mean, std = self.read("reward"), self.read("reward_std", optional=True)
        witnesses = self._moved(logs)
        for key in filter(SHARE_ABOVE.fullmatch, logs):
            shares = self.follow(key, self._number(key, logs[key]), answers=self.answers)
            if (share := shares.above(plus=self.share_above)) is not None:
                advice = "Many scores are near the highest one: look at what these completions have in common."
                yield Finding(f"`{key}` is high", share, self.share_above, advice, acts=False)
        if mean is None:
            return
        base, means = self._baseline(mean, std), self.follow("reward", mean)
        if base is None:
            return
        start, sigma, count = base

        def error(sigmas: float) -> float:
            """Return the standard error of the bound start + sigmas · σ, estimated from `count` scores."""
            return sigma * math.sqrt((1 + sigmas**2 / 2) / count)

        bound = start + self.sigmas * sigma
        if (risen := means.above(plus=bound, error=error(self.sigmas))) is not None:
            what = f"the reward is beyond {self.sigmas:g} σ"
            advice = "Compare completions of the first rollouts with those of the last."
            if witnesses:
                what, advice = f"{what}, and more moved with it", f"{', '.join(witnesses)} moved, too. {advice}"
            yield Finding(what, risen, bound, advice, start, acts=bool(witnesses))
        bound = start - self.drop_sigmas * sigma
        if (fallen := means.below(plus=bound, error=error(self.drop_sigmas))) is not None:
            advice = "The policy gets worse: lower the learning rate, or look for a reward function that fails."
            yield Finding(f"the reward fell by {self.drop_sigmas:g} σ", fallen, bound, advice, start, acts=False)
        if std is None:
            return
        answers, bound = self.answers, self.std * sigma
        noise: dict[str, Any] = {} if answers is None else {"error": std / math.sqrt(2 * answers), "dof": answers}
        spreads = self.follow("reward_std", std, **noise)
        of_bound = bound / math.sqrt(2 * count)
        if (low := spreads.below(plus=bound, error=of_bound)) is not None:
            advice = (
                "All answers get about the same score, so the policy has nothing to learn from. Check whether they "
                "are one and the same answer."
            )
            yield Finding("the rewards' spread collapsed", low, bound, advice, sigma, acts=False)

    def _baseline(self, mean: float, std: float | None) -> tuple[float, float, float] | None:
        """
        Return the mean, the σ and the number of independent scores of the baseline; None while it has too few scores.

        Then add this log's scores to the baseline, unless it is full.
        """
        if self.baseline is not None:
            return self.baseline[0], self.baseline[1], math.inf
        count, start, squares = self.memory.setdefault("scores", [0, 0.0, 0.0])
        independent = count / (getattr(self._args, "num_generations", None) or 1)
        is_enough = count >= self.minimum and squares > 0
        result = (start, math.sqrt(squares / (count - 1)), independent) if is_enough else None
        if count < self.window and std is not None:  # merged as in `trl_ext.functional.merge_moments`
            n = getattr(self._args, "generation_batch_size", None) or self._args.train_batch_size
            total, delta = count + n, mean - start
            squares += std**2 * (n - 1) + delta**2 * count * n / total
            self.memory["scores"] = [total, start + delta * n / total, squares]
        return result

    def _moved(self, logs) -> list[str]:
        """Return the names of the witnesses that have moved."""
        values = {name: self.read(name, optional=True) for name in WITNESSES}
        values |= {key: self._number(key, logs[key]) for key in logs if WITNESS_KEYS.fullmatch(key)}
        last = self.memory.setdefault("witnesses", {})
        for name, value in values.items():
            noise: dict[str, Any] = {"answers": self.answers} if name.startswith("repetition/") else {}
            logs_of_a_value = self.windows(1)["logs"] if name == "entropy" else 1
            series = self.follow(name, value, first=self.rollouts, logs=logs_of_a_value, **noise)
            if series.first is not None:
                moved = series.above(1 + self.moved), series.below(1 - self.moved)
                last[name] = moved != (None, None)
        gold = ["gold"] if self.memory.get("gold_fell") else []
        return [name for name, is_off in sorted(last.items()) if is_off] + gold
