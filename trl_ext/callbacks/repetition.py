"""Repetition within and between completions, and copying."""

import re
from dataclasses import dataclass

from .monitor import Finding, MonitorCallback

DISTINCT = re.compile(r"repetition/distinct_\d+")


@dataclass(eq=False, kw_only=True)
class RepetitionCallback(MonitorCallback):
    """
    Alert when completions repeat themselves or each other more than in the first rollouts, or copy the corpus.

    [`~trl_ext.rewards.RepetitionWatch`] measures this; put it among the reward functions.

    Args:
        phrase: alert when the share of completions with the most frequent phrase rises by more than this.
        distinct: alert when the share of different n-grams falls below this part of the baseline.
        repeated: alert when the share of n-grams that a completion repeats rises by more than this.
        copied: alert when more than this share of completions copies the corpus.
        rollouts: number of first rollouts in the baseline.
        others: see [`MonitorCallback`].
    """

    phrase: float = 0.5
    distinct: float = 0.3
    repeated: float = 0.1
    copied: float = 0.1
    rollouts: int = 4
    runbook = "repetition"

    def __post_init__(self) -> None:
        super().__post_init__()
        shares = (self.phrase, self.distinct, self.repeated, self.copied)
        if not all(0 < share < 1 for share in shares) or self.rollouts < 1:
            raise ValueError(
                "`phrase`, `distinct`, `repeated` and `copied` must lie in (0, 1), `rollouts` be 1 or more; got "
                f"{', '.join(map(str, shares))} and {self.rollouts}"
            )

    def watch(self, logs):
        distinct = next((key for key in logs if DISTINCT.fullmatch(key)), None)
        values = {
            "distinct": None if distinct is None else self._number(distinct, logs[distinct]),
            "phrase": self._number("repetition/top_phrase_share", logs.get("repetition/top_phrase_share")),
            "repeated": self._number("repetition/repeated", logs.get("repetition/repeated")),
            "copied": self._number("repetition/copied_share", logs.get("repetition/copied_share")),
        }
        if values["phrase"] is None and not self.memory.get("found"):
            self.read("repetition")  # says once if nothing is logged for a whole rollout
        self.memory["found"] = self.memory.get("found", False) or values["phrase"] is not None
        shares = {
            name: self.follow(name, value, first=0 if name == "copied" else self.rollouts, answers=self.answers)
            for name, value in values.items()
            if value is not None
        }
        advice = "Read `completions.rank*.jsonl` and the phrase there; mend a reward that likes it."
        for name, what in (("phrase", "one phrase spreads"), ("repeated", "completions repeat themselves")):
            share, rise = shares.get(name), getattr(self, name)
            if share is not None and (mean := share.above(1, rise)) is not None:
                first = share.first or 0.0
                yield Finding(what, mean, first + rise, advice, first)
        share = shares.get("distinct")
        if share is not None and (mean := share.below(self.distinct)) is not None:
            first = share.first or 0.0
            yield Finding("completions grew alike", mean, self.distinct * first, advice, first)
        share = shares.get("copied")
        if share is not None and (mean := share.above(plus=self.copied)) is not None:
            yield Finding("completions copy the corpus", mean, self.copied, advice)
