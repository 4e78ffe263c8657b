"""Principles that bound a score: who breaks one cannot earn more than a cap, however good the rest is."""

import math
from collections.abc import Callable
from typing import Any

from .cached import among, of_rows
from .member import Member, OnError, distinct, is_finite_number, log_to, scores_of_all
from .naming import checked_name


class ConstitutionReward:
    """
    Cap the score of answers that break a principle.

    A principle is a reward function with a minimum: an answer that scores less breaks it, and its score is at most
    `cap`. Rules are principles that cost nothing; the judge, where there is one, is asked only about answers that keep
    all of them. An answer for which a principle has no score (None) is not known to keep it: unless it breaks another,
    its own score is None, so that it is not rewarded. Otherwise the score is that of `reward`, with its range. Where
    `reward` fails and is skipped there is no score at all, not even the cap, since it might have been lower.

    It logs `rewards/<name>/violations`, the share of answers that break a principle; for each principle
    `rewards/<name>/violations/<principle>`, among the answers that it scored; and `rewards/<name>/unchecked`, the
    share of answers without a score for that reason.

    Args:
        reward: the reward function whose scores are capped.
        members: the principles, reward functions as [`PatternReward`]. Their names are those in the logs.
        cap: the highest score of an answer that breaks a principle. Choose one below what `reward` gives bad answers.
        minimum: the lowest score with which a principle is kept: one for all, or a list with one a principle.
        judge: one more principle, asked last.
        judge_minimum: the judge's minimum.
        on_error: what happens where a function fails: `"raise"`, `"skip"` (the answer has no score), or a number,
            which is that function's score.
        name: in the logs; by default `constitution_<name of the reward>`.
    """

    def __init__(
        self,
        reward: Callable,
        members: list[Callable] | None = None,
        cap: float = 0.0,
        minimum: float | list[float] = 0.5,
        judge: Callable | None = None,
        judge_minimum: float = 0.5,
        on_error: OnError = "raise",
        name: str | None = None,
    ):
        if not isinstance(members, (list, tuple, type(None))):
            raise ValueError(f"`members` must be a list of reward functions, got {members!r}")
        members = [*(members or ())]
        if not members and judge is None:
            raise ValueError("give principles: `members`, a `judge`, or both; got none")
        minimums = [*minimum] if isinstance(minimum, (list, tuple)) else [minimum] * len(members)
        if len(minimums) != len(members):
            raise ValueError(f"`minimum` must be a number, or one for each of {len(members)} members, got {minimum}")
        for argument, values in [("cap", [cap]), ("minimum", minimums), ("judge_minimum", [judge_minimum])]:
            for value in values:
                if not is_finite_number(value):
                    raise ValueError(f"`{argument}` must be a finite number, got {value!r}")
        self.reward = reward
        self.members = members
        self.cap = float(cap)
        self.minimum = minimum
        self.judge = judge
        self.judge_minimum = judge_minimum
        self.on_error = on_error
        self._scorer = Member(reward, on_error)
        self._principles = [Member(each, on_error) for each in members]
        self._minimums = minimums
        self._judge = None if judge is None else Member(judge, on_error)
        self._names = distinct([each.name for each in (*self._principles, self._judge) if each])
        self.__name__ = checked_name(name, f"constitution_{self._scorer.name}")

    @property
    def in_background(self) -> bool:
        """Whether the time of any function goes by elsewhere."""
        return any(each.in_background for each in (self._scorer, *self._principles, self._judge) if each)

    def __call__(
        self, prompts: list, completions: list, completion_ids: Any = None, log_metric: Any = None, **kwargs: Any
    ) -> list[float | None]:
        """Return the scores, capped where a principle is broken."""
        if not completions:
            return []
        count = len(completions)
        columns = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **kwargs}
        scores, *checked = scores_of_all([self._scorer, *self._principles], log_metric, **columns)
        breaks, unchecked = [False] * count, [False] * count
        shares: dict[str, float | None] = {}

        def note(name: str, minimum: float, rows: list[int], given: list[float | None]) -> None:
            for row, score in zip(rows, given, strict=True):
                breaks[row] |= score is not None and score < minimum
                unchecked[row] |= score is None or math.isnan(score)
            known = [score < minimum for score in given if score is not None and not math.isnan(score)]
            shares[f"violations/{name}"] = sum(known) / len(known) if known else None

        for name, minimum, given in zip(self._names, self._minimums, checked, strict=False):
            note(name, minimum, [*range(count)], given)
        if self._judge and (rows := [row for row in range(count) if not breaks[row]]):
            try:
                given = self._judge(log_metric=log_metric, **of_rows(columns, rows, count))
            except RuntimeError as error:
                raise RuntimeError(f"{error}{among(rows, count)}") from error
            note(self._names[-1], self.judge_minimum, rows, given)
        for row, score in enumerate(scores):
            has_failed = score is not None and math.isnan(score)
            if has_failed or unchecked[row] and not breaks[row]:
                scores[row] = None
            elif breaks[row]:
                scores[row] = self.cap if score is None else min(score, self.cap)
        left_out = sum(not broken and not_known for broken, not_known in zip(breaks, unchecked, strict=True))
        shares |= {"violations": sum(breaks) / count, "unchecked": left_out / count}
        log_to(log_metric, {f"rewards/{self.__name__}/{key}": share for key, share in shares.items()})
        return scores
