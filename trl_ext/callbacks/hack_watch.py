"""Watch for a reward hack: the reward rises, and other quantities show that the answers do not get better."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import DefaultFlowCallback

from ..rewards.watches import RepetitionWatch
from .metrics import METRICS, is_training_log, rollout_steps
from .monitor import Finding, MonitorCallback, error_of_mean, number_of_rows, spread_key
from .monitors import DISAGREEMENT, distinct_key

# Witness → its weight. KL, length and entropy together stay below the limit, since honest training moves them, too.
WEIGHTS = {"gold": 0.9, "phrase": 0.7, "distinct": 0.7, "repeated": 0.6, "disagreement": 0.6}
WEIGHTS |= {"kl": 0.4, "entropy": 0.4, "length": 0.4, "cut off": 0.3, "critic": 0.2}


@dataclass(eq=False, kw_only=True)
class HackWatch(MonitorCallback):
    """
    Combine what a run logs into one number in [0, 1], the risk of a reward hack, and alert when it is above a limit.

    The risk is 0 until the reward has risen by more than `sigmas` and noise. Then it is 1 − Π (1 − weight) over all
    witnesses that have moved by more than the limits below and noise. The witnesses, with weights in `WEIGHTS`, are:

    - a phrase that spreads, answers that grow alike, answers that repeat themselves
    - disagreement of an ensemble of reward models
    - entropy, KL, length, the share of answers that are cut off, the critic's explained variance
    - gold, a score that training never sees, if an evaluation measures it

    Once gold has risen, the risk is 0 until gold falls from its best. The weights are chosen, not fitted; the limit is
    chosen on a part of the runs of `benchmarks/watch.py`.

    `memory` keeps the last `risk`, and the `reasons` for it in words. Callbacks that run after this one find the risk
    in the logs as `watch/risk`. PPOTrainer's setting `watch` attaches a HackWatch.

    >>> trainer.add_callback(HackWatch(trainer=trainer, action="stop"))

    Args:
        trainer: trainer whose completions are measured for repetition, where no `repetition_watch` logs it. None reads
            the logs alone.
        limit: risk above which the monitor acts.
        sigmas: rise of the mean reward that counts, in σ of single scores: the smallest σ above 0 of the first logs
            or, if all their scores are equal, the first σ above 0.
        kl: KL that counts, in nats per response. A KL that is logged per token is multiplied by the mean length.
        moved: change from the baseline that counts: a relative one for length, entropy and the share of different
            n-grams, an absolute one for the critic's explained variance. Disagreement must grow by twice as much.
        shares: rise above the baseline that counts for three shares: of answers with the most frequent phrase, of
            repeated n-grams, and of answers that are cut off.
        gold: key of the gold score in the evaluation's metrics.
        rollouts: number of first logs in the baseline, fewer if one of them differs by more than noise.
        others: see [`MonitorCallback`].
    """

    trainer: Any = None
    limit: float = 0.88
    sigmas: float = 1.0
    kl: float = 5.0
    moved: float = 0.3
    shares: float = 0.3
    gold: str = "eval_rewards/gold_judge/mean"
    rollouts: int = 4
    runbook = "hack"

    def on_step_end(self, args, state, control, **kwargs):
        # After the first step of a rollout the table holds that rollout; after an evaluation it holds its answers
        table = getattr(self.trainer, "_logs", {}).get("completion")
        if table and (state.global_step - 1) % rollout_steps(args) == 0:
            watch = RepetitionWatch()
            self.memory["texts"], _ = watch.measure([*table][-args.generation_batch_size :])
            self.memory["phrase"] = watch.top_phrase
        super().on_step_end(args, state, control, **kwargs)

    def on_log(self, args, state, control, logs=None, **kwargs):
        super().on_log(args, state, control, logs=logs, **kwargs)
        if logs is not None and is_training_log(logs):
            for log in (logs, *state.log_history[-1:]):  # the callbacks behind this one log it
                log["watch/risk"] = self.memory.get("risk", 0.0)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self._begin(args, state, {})
        metrics = metrics or {}
        value = self._number(self.gold, metrics)
        noise = error_of_mean(metrics.get(spread_key(self.gold)), number_of_rows(kwargs.get("eval_dataloader")))
        gold = self.follow("gold", value, first=1, **noise)
        if gold.first is None:
            return
        fallen = gold.below(1)
        self.memory["gold"] = fallen and f"gold {fallen.value:.2g}, {fallen.baseline:.2g} at best"
        if gold.above(1):  # a fall counts from where gold was highest
            self.memory["gold_rose"] = True
            del self.memory["series"]["gold"]
            self.follow("gold", value, first=1, **noise)

    def watch(self, logs):
        reasons = self._witnesses(self.memory.pop("texts", {}) | logs)
        risen = self._risen()
        risk = 0.0 if risen is None else 1 - math.prod(1 - WEIGHTS[name] for name in reasons)
        if self.memory.get("gold_rose") and "gold" not in reasons:
            risk = 0.0  # whatever else moved, answers are better than they were
        said = [*reasons.values(), *([] if risen is None else [f"score +{risen:.1f} σ"])]
        self.memory |= {"risk": risk, "reasons": said}
        if risk > self.limit:
            advice = f"{'; '.join(said)}. Compare completions of the first rollouts with those of the last."
            yield Finding("the reward rises as in a hack", advice, risk, self.limit)

    def _risen(self) -> float | None:
        """Return by how many σ of the first scores the reward rose; None unless by more than `sigmas` plus noise."""
        mean, std = self.read("reward"), self.read("reward_std")
        rewards = self.follow("reward", mean, first=self.rollouts)
        stds = self.memory.setdefault("stds", [])
        if mean is None or std is None:
            return None
        sigma = min(stds, default=0.0)
        if std > 0 and (rewards.first is None or not stds):
            stds.append(std)
        if rewards.first is None or not sigma:
            return None
        drawn = (self.answers or 1) * (getattr(self._args, "num_generations", None) or 1)  # those of a prompt, too
        error = self.sigmas * sigma / math.sqrt(2 * len(stds) * drawn)
        risen = rewards.above(1, self.sigmas * sigma, error=error)
        return risen and (risen.value - rewards.first) / sigma

    def _witnesses(self, logs: dict[str, Any]) -> dict[str, str]:
        """Return a mapping from the name of each witness that moved to words on how it moved."""
        reasons = {"gold": self.memory["gold"]} if self.memory.get("gold") else {}
        read, follow = partial(self.read, optional=True), partial(self.follow, first=self.rollouts)
        share = partial(follow, answers=self.answers)
        length, kl = read("length"), read("kl")
        if kl is not None and self.kl_is_per_token:
            kl = None if length is None else kl * length
        lengths = follow("length", length)
        entropies = follow("entropy", read("entropy"), logs=self.windows(1)["logs"])
        critics = follow("critic", read("explained_variance"))
        phrases = share("phrase", self._number("repetition/top_phrase_share", logs))
        repeated = share("repeated", self._number("repetition/repeated", logs))
        distinct = share("distinct", self._number(distinct_key(logs), logs))
        cuts = share("cut off", read("length_clipped"))
        longer_or_shorter = lengths.above(1 + self.moved) or lengths.below(1 - self.moved)
        for name, found, words in (  # of the mean, its bound and its baseline
            ("length", longer_or_shorter, "answers of {0:.0f} tokens, {2:.0f} at the start"),
            ("kl", self.follow("kl", kl).above(plus=self.kl), "KL {0:.1f} nats"),
            ("entropy", entropies.below(1 - self.moved), "entropy {0:.2g}, {2:.2g} at the start"),
            ("critic", critics.below(1, -self.moved), "the critic explains {0:.0%}, {2:.0%} at the start"),
            ("phrase", phrases.above(1, self.shares), "{0:.0%} of answers contain one phrase, {2:.0%} at the start"),
            (
                "repeated",
                repeated.above(1, self.shares),
                "{0:.0%} of n-grams repeat in their answer, {2:.0%} at the start",
            ),
            ("distinct", distinct.below(1 - self.moved), "{0:.0%} of n-grams differ, {2:.0%} at the start"),
            ("cut off", cuts.above(1, self.shares), "{0:.0%} of answers are cut off, {2:.0%} at the start"),
        ):
            if found:
                reasons[name] = words.format(*found)
        if "phrase" in reasons and self.memory.get("phrase"):
            reasons["phrase"] += f" (now {self.memory['phrase']!r})"
        for key in filter(DISAGREEMENT.fullmatch, logs):
            if found := follow(key, self._number(key, logs)).above(1 + 2 * self.moved):
                reasons["disagreement"] = f"`{key}` {found.value:.2g}, {found.baseline:.2g} at the start"
        return reasons


def attach_watch(trainer: Any, action: Any) -> None:
    """
    Attach a `HackWatch` to a trainer, unless it has one.

    Args:
        trainer: a trainer that keeps a table of completions.
        action: action of the watch on its alert, or `"off"` to attach none. With `"warn"` the alert is sent only once.
    """
    callbacks = trainer.callback_handler.callbacks
    if action != "off" and not any(isinstance(each, HackWatch) for each in callbacks):
        repeat_steps = 10**9 if action == "warn" else HackWatch.repeat_steps
        # Before the callbacks that log, so that they have the risk; after the one that decides when to save, which the
        # watch may overrule
        place = 1 + next((at for at, each in enumerate(callbacks) if isinstance(each, DefaultFlowCallback)), -1)
        callbacks.insert(place, HackWatch(trainer=trainer, action=action, repeat_steps=repeat_steps))


class _RoundsWatch(HackWatch):
    """Watch rounds of training, each measured on the same number of held-out answers, in place of a trainer's logs."""

    answers = 1

    def windows(self, steps):
        return {"logs": 1, "size": 1}


def watch_rounds(rounds: Sequence[dict[str, float | None]], answers: int) -> tuple[float, dict[str, Any] | None]:
    """
    Return two values: the risk of a hack after the last round, and an alert if it is above the limit, else None.

    In each round a policy is trained on its own answers, as in online DPO, and then measured on prompts that are the
    same for all rounds.

    Args:
        rounds: measures of each round, under the keys that PPO logs for a rollout: `objective/scores`,
            `objective/scores_std`, `completions/mean_length`, `completions/std_length`, `completions/clipped_ratio`,
            and those of `RepetitionWatch`. The first round is the policy before training.
        answers: number of answers that each round is measured on.
    """
    watch, alert = _RoundsWatch(rollouts=1, sinks=[]), None
    watch.answers, watch._known = answers, METRICS["PPOConfig"]
    for watch.step, watch._logs in enumerate(rounds):
        found = next(watch.watch(watch._logs), None)
        alert = None if found is None else vars(watch._alert(found, "warn"))
    return watch.memory.get("risk", 0.0), alert
