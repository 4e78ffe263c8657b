"""Watch how much completions repeat themselves and each other, and copy a corpus."""

import re
from dataclasses import dataclass

from ..rewards.watches.repetition import RepetitionWatch
from ..runs.needs import rewards_of
from .monitor import AT_LEAST_ONE, SHARE, Finding, MonitorCallback

DISTINCT = re.compile(r"repetition/distinct_\d+")


@dataclass(eq=False, kw_only=True)
class RepetitionCallback(MonitorCallback):
    """
    Alert when completions repeat themselves or each other more than in the first rollouts, or copy the corpus.

    [`~trl_ext.rewards.RepetitionWatch`] measures repetition and copying: put it among the reward functions.

    >>> trainer.add_callback(RepetitionCallback(phrase=0.4, action="stop"))

    Args:
        phrase: alert when the share of completions with the most frequent phrase rises above the baseline by more than
            this.
        distinct: alert when the share of different n-grams falls below this part of the baseline.
        repeated: alert when the share of n-grams that a completion repeats rises above the baseline by more than this.
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
    ranges = dict.fromkeys(("phrase", "distinct", "repeated", "copied"), SHARE) | {"rollouts": AT_LEAST_ONE}

    def lacks(self, trainer):
        """Yield a sentence if no reward function measures repetition."""
        if not any(isinstance(each, RepetitionWatch) for each in rewards_of(trainer)):
            yield (
                "RepetitionCallback has nothing to watch: `repetition_watch` is not among the reward functions. Add "
                "it with weight 0, or remove the monitor."
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
        }
        advice = (
            "Read the completions and the phrase in `completions.rank*.jsonl`, and change a reward that favours them."
        )
        for name, what in (("phrase", "one phrase spreads"), ("repeated", "completions repeat themselves")):
            share, rise = shares[name], getattr(self, name)
            if (mean := share.above(1, rise)) is not None:
                first = share.first or 0.0
                yield Finding(what, mean, first + rise, advice, first)
        if (mean := shares["distinct"].below(self.distinct)) is not None:
            first = shares["distinct"].first or 0.0
            yield Finding("completions grew alike", mean, self.distinct * first, advice, first)
        if (mean := shares["copied"].above(plus=self.copied)) is not None:
            yield Finding("completions copy the corpus", mean, self.copied, advice)
