"""The distribution of the reward."""

import math
import re
from dataclasses import dataclass

from .monitor import Finding, MonitorCallback

SHARE_ABOVE = re.compile(r"score_watch/.+/share_above")
# What else moves in a hack: quantities of `trl_ext.metrics`, and keys of the logs
WITNESSES = ("entropy", "length")
WITNESS_KEYS = re.compile(r"repetition/(top_phrase_share|repeated|distinct_\d+)|rewards/.+/disagreement")


@dataclass(eq=False, kw_only=True)
class RewardDriftCallback(MonitorCallback):
    """
    Alert when the reward's mean or spread moves far from those of the first scores.

    Reinforcement learning is meant to raise the mean, so a rise is measured in σ of *single* scores. A rise alone only
    warns. The monitor acts if a witness moved, too: entropy, length, repetition, disagreement, or gold. A drop of the
    mean, a collapsed spread and too many scores above a bound only warn.

    Args:
        sigmas: rise of the mean, in σ of the baseline.
        drop_sigmas: fall of the mean, in σ of the baseline.
        std: lowest spread, as a part of the baseline's σ.
        share_above: largest share of scores above the bound of [`~trl_ext.rewards.ScoreWatch`], if it is in use.
        window: number of scores in the full baseline.
        minimum: number of scores after which the baseline is used.
        baseline: mean and σ, to set them by hand.
        moved: a witness moved if it differs from the mean of its first `rollouts` by more than this part of it.
        gold: key of the evaluation's gold score, which is a witness once it falls below the first evaluation's.
        rollouts: number of first logs in a witness' baseline.
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.sigmas > 0 and self.drop_sigmas > 0 and 0 < self.std < 1 and 0 < self.share_above < 1):
            raise ValueError(
                "`sigmas` and `drop_sigmas` must be above 0, `std` and `share_above` lie in (0, 1); got "
                f"{self.sigmas}, {self.drop_sigmas}, {self.std} and {self.share_above}"
            )
        if not 2 <= self.minimum <= self.window or self.moved <= 0 or self.rollouts < 1:
            raise ValueError(
                "`minimum` must be 2 or more and at most `window`, `moved` above 0, `rollouts` 1 or more; got "
                f"{self.minimum}, {self.window}, {self.moved} and {self.rollouts}"
            )
        if self.baseline is not None and not (len(self.baseline) == 2 and self.baseline[1] > 0):
            raise ValueError(f"`baseline` must be a mean and a σ above 0, got {self.baseline}")

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        value = (metrics or {}).get(self.gold)
        if value is not None:
            self.memory["gold"] = float(value)
            self.memory.setdefault("first_gold", self.memory["gold"])

    def watch(self, logs):
        mean, std = self.read("reward"), self.read("reward_std", optional=True)
        witnesses = self._moved(logs)
        for key in filter(SHARE_ABOVE.fullmatch, logs):
            share = self._number(key, logs[key])
            if share is not None and share > self.share_above:
                advice = "Many scores are near the top: look at what these completions have in common."
                yield Finding(f"`{key}` is high", share, self.share_above, advice, acts=False)
        if mean is None:
            return
        base = self._baseline(mean, std)
        if base is None:
            return
        start, sigma = base
        if mean > start + self.sigmas * sigma:
            what, advice = (
                f"the reward is beyond {self.sigmas:g} σ",
                "Compare completions of the first rollouts and of now.",
            )
            if witnesses:
                what, advice = f"{what}, and more moved with it", f"So did {', '.join(witnesses)}. {advice}"
            yield Finding(what, mean, start + self.sigmas * sigma, advice, start, acts=bool(witnesses))
        if mean < start - self.drop_sigmas * sigma:
            advice = "The policy gets worse: lower the learning rate, or look for a reward function that fails."
            bound = start - self.drop_sigmas * sigma
            yield Finding(f"the reward fell by {self.drop_sigmas:g} σ", mean, bound, advice, start, acts=False)
        if std is not None and std < self.std * sigma:
            advice = "All answers score alike, so nothing is left to learn: see whether they are one answer."
            yield Finding("the rewards' spread collapsed", std, self.std * sigma, advice, sigma, acts=False)

    def _baseline(self, mean: float, std: float | None) -> tuple[float, float] | None:
        """Return mean and σ of the first scores, then add this log's to them."""
        if self.baseline is not None:
            return self.baseline[0], self.baseline[1]
        count, start, squares = self.memory.setdefault("scores", [0, 0.0, 0.0])
        result = (start, math.sqrt(squares / (count - 1))) if count >= self.minimum and squares > 0 else None
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
            first = None if value is None else self.first_mean(name, value, self.rollouts)
            if first is not None:
                last[name] = abs((value or 0.0) - first) > self.moved * abs(first)
        gold = self.memory.get("gold") is not None and self.memory["gold"] < self.memory["first_gold"]
        return [name for name, is_off in sorted(last.items()) if is_off] + (["gold"] if gold else [])
