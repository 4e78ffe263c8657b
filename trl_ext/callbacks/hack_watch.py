"""Watch for reward hacking by what every on-policy run logs: the reward rises, and the answers grow alike."""

import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from ..rewards.texts import text_of, words_of
from ..rewards.watches.repetition import ngrams
from ..runs.processes import from_first
from .metrics import rollout_steps
from .monitor import ABOVE_ONE, AT_LEAST_ONE, POSITIVE, SHARE, Finding
from .reward_drift import FirstScores

DISTINCT = re.compile(r"repetition/distinct_\d+")
DISAGREEMENT = re.compile(r"rewards/.+/disagreement")
PHRASE = 3  # words
KEPT = 200  # phrases of the first rollout whose share is remembered


@dataclass(eq=False, kw_only=True)
class HackWatch(FirstScores):
    """
    Alert when the reward has risen and the answers show a mark of a hack, and say which.

    A mark is a phrase that spreads over the answers, n-grams that grow alike, a length that changes, a KL far from 0,
    or reward models that disagree more. The reward is meant to rise, and honest answers may get longer or go far from
    the reference: so the watch acts only where the rise and a mark are both beyond their bounds by more than their
    noise. The risk, min(rise, largest mark), is in [0, 1), each of them being x / (x + its bound): 0.5 at the bounds.

    Phrases come from `repetition_watch` among the reward functions, or, given `trainer`, from its table of
    completions. No gold is needed. A hack that changes none of these quantities is not seen.

    >>> trainer.add_callback(HackWatch(trainer=trainer, action="stop"))

    Args:
        trainer: a [`PPOTrainer`], GRPOTrainer or RLOOTrainer, whose table of completions is read. Recipes set it.
        sigmas: rise of the mean reward, in σ of the first single scores.
        phrase: rise of the share of answers with the most frequent phrase of three words.
        distinct: the share of different n-grams, as a part of that of the first rollouts.
        kl: nats per response.
        length: factor by which the mean length grows or shrinks.
        disagreement: factor by which the disagreement of reward models grows.
        rollouts: number of first rollouts in the baselines.
        window, minimum, baseline: see [`RewardDriftCallback`].
        others: see [`MonitorCallback`].
    """

    trainer: Any = None
    sigmas: float = 1.0
    phrase: float = 0.3
    distinct: float = 0.5
    kl: float = 8.0
    length: float = 1.5
    disagreement: float = 2.0
    rollouts: int = 4
    runbook = "hack"
    ranges = {
        "sigmas": POSITIVE,
        "phrase": SHARE,
        "distinct": SHARE,
        "kl": POSITIVE,
        "length": ABOVE_ONE,
        "disagreement": ABOVE_ONE,
        "rollouts": AT_LEAST_ONE,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trainer is not None and not hasattr(self.trainer, "_logs"):
            raise ValueError(
                f"`trainer` must be a PPOTrainer, GRPOTrainer or RLOOTrainer, got a {type(self.trainer).__name__}: "
                "leave it out, and put `repetition_watch` among the reward functions"
            )

    def on_step_end(self, args, state, control, **kwargs):
        super().on_step_end(args, state, control, **kwargs)
        if self.trainer is not None and (state.global_step - 1) % rollout_steps(args) == 0:
            self._read_texts([*self.trainer._logs["completion"]][-args.generation_batch_size :])

    def _read_texts(self, completions: list[Any]) -> None:
        """Remember the most frequent phrase of a rollout, its share, and its share in the first rollout."""
        if not completions:
            return
        rows = [ngrams(words_of(text_of(completion)), PHRASE) for completion in completions]
        counts = Counter(" ".join(gram) for row in rows for gram in set(row))
        kept = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:KEPT]
        first = self.memory.setdefault("phrases", {name: count / len(rows) for name, count in kept})
        name, count = kept[0] if kept else ("", 0)
        before = first.get(name, min(first.values(), default=0.0) if len(first) == KEPT else 0.0)
        every = sum(map(len, rows))
        different = len({gram for row in rows for gram in row}) / every if every else None
        self.memory["texts"] = {"top": name, "share": count / len(rows), "before": before, "distinct": different}

    def watch(self, logs):
        reward, std = self.read("reward"), self.read("reward_std", optional=True)
        marks = self._marks(logs)
        if reward is None:
            return
        base, rewards = self.first_scores(reward, std), self.follow("reward", reward)
        if base is None:
            return
        start, sigma, count = base
        bound = start + self.sigmas * sigma
        error = sigma * math.sqrt((1 + self.sigmas**2 / 2) / count)
        rise = (reward - start) / sigma
        risk = min(_part(rise, self.sigmas), max((part for part, _, _ in marks), default=0.0))
        sure = [words for _, words, is_sure in marks if is_sure]
        self.memory["risk"] = risk
        if rewards.above(plus=bound, error=error) is not None and sure:
            reasons = "; ".join([f"the reward rose by {rise:.1f} σ", *sure])
            advice = f"{reasons[0].upper()}{reasons[1:]}. Read completions of the first rollouts and of now."
            yield Finding("the reward may be gamed", risk, 0.5, advice)

    def _marks(self, logs: dict[str, Any]) -> list[tuple[float, str, bool]]:
        """Return of each mark its part of the risk, what it is in words, and whether it is beyond its bound."""
        return [mark for mark in (*self._of_texts(logs), self._of_kl(), *self._of_lengths(logs)) if mark is not None]

    def _of_texts(self, logs: dict[str, Any]):
        """Yield what is known of phrases."""
        texts = self.memory.pop("texts", None)  # of the rollout that this log is the first of
        texts = texts if self.trainer is None else from_first(texts)
        if texts is None:
            key = next(filter(DISTINCT.fullmatch, logs), "")
            share = self._number("repetition/top_phrase_share", logs.get("repetition/top_phrase_share"))
            texts = {"share": share, "distinct": self._number(key, logs.get(key)), "top": None}
        shares = self.follow("phrase", texts["share"], first=self.rollouts, answers=self.answers)
        if shares.first is not None:
            found = f"{texts['share']:.0%} of the answers share a phrase, {shares.first:.0%} at first"
            if texts["top"]:
                found = f"{texts['share']:.0%} of the answers have {texts['top']!r}, {texts['before']:.0%} at first"
            sure = shares.above(1, self.phrase) is not None
            yield _part(texts["share"] - shares.first, self.phrase), found, sure
        different = self.follow("distinct", texts["distinct"], first=self.rollouts)
        if different.first:
            fall = 1 - texts["distinct"] / different.first
            found = f"{texts['distinct']:.0%} of the n-grams differ, {different.first:.0%} at first"
            yield _part(fall, 1 - self.distinct), found, different.below(self.distinct) is not None

    def _of_kl(self) -> tuple[float, str, bool] | None:
        kl, metric, length = self.read("kl", optional=True), self._known.get("kl"), self.read("length", optional=True)
        if kl is not None and metric is not None and metric.unit == "nats per token" and "kl" not in self.keys:
            kl = None if length is None else kl * length
        series = self.follow("kl", kl, **(self.noise("kl") or {"error": 0.0}))
        if kl is None:
            return None
        return _part(kl, self.kl), f"the KL is {kl:.1f} nats", series.above(plus=self.kl) is not None

    def _of_lengths(self, logs: dict[str, Any]):
        """Yield what is known of the answers' length and the reward models' disagreement."""
        length = self.read("length", optional=True)
        lengths = self.follow("length", length, first=self.rollouts)
        if lengths.first and length:
            sure = lengths.above(self.length) is not None or lengths.below(1 / self.length) is not None
            found = f"answers have {length:.0f} tokens, {lengths.first:.0f} at first"
            yield _part(abs(math.log(length / lengths.first)), math.log(self.length)), found, sure
        for key in filter(DISAGREEMENT.fullmatch, logs):
            value = self._number(key, logs[key])
            series = self.follow(key, value, first=self.rollouts)
            if series.first and value is not None:
                found = f"reward models disagree {value / series.first:.1f} times as much as at first"
                part = _part(value / series.first - 1, self.disagreement - 1)
                yield part, found, series.above(self.disagreement) is not None


def _part(value: float, bound: float) -> float:
    """Return value / (value + bound), 0 for a value below 0: in [0, 1), and 0.5 at the bound."""
    return max(value, 0.0) / (max(value, 0.0) + bound)
