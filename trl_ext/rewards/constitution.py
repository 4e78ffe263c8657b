"""Cap the score of an answer that breaks a principle, however good the answer is otherwise."""

import math
from collections.abc import Callable
from typing import Any

from .checks import OnError, check_finite, checked_name
from .member import HoldsRewards, Member, distinct, log_to, of_rows, scores_of_all


class ConstitutionReward(HoldsRewards):
    """
    Cap the score of answers that break a principle.

    A principle is a reward function with a minimum. An answer breaks the principle if that function scores it below
    the minimum. Each answer's score is what `reward` gives it; if the answer breaks a principle, the score is at most
    `cap`, and is `cap` if `reward` does not apply. The `judge`, one more principle, is asked only about answers that
    break none of `members`, which should be cheap rules.

    If a principle gives an answer no score, and the answer breaks no other principle, it scores None, so that it is
    not rewarded. It also scores None if `reward` fails on it and is skipped: the missing score might be below `cap`.

    Logs:

    - `rewards/<name>/violations`: share of answers that break a principle
    - `rewards/<name>/violations/<principle>`: share that break this principle, of the answers that it scored
    - `rewards/<name>/unchecked`: share of answers that score None because a principle gave them no score

    Args:
        reward: the reward function whose scores are capped.
        members: the principles: reward functions such as [`PatternReward`].
        cap: the highest score of an answer that breaks a principle. Choose one below what `reward` gives bad answers.
        minimum: the lowest score of an answer that keeps a principle: one number for all `members`, or a list with
            one for each.
        judge: a reward function, one more principle, which is asked last.
        judge_minimum: the lowest score that the judge gives an answer that keeps its principle.
        on_error: what happens if a function fails: `"raise"` raises an error, `"skip"` leaves the answer without that
            function's score, a number is that function's score.
        name: key in the logs; by default `constitution_<name of the reward>`.

    Examples:
        >>> from trl_ext.rewards import ConstitutionReward, PatternReward
        >>> def length(completions, **kwargs):
        ...     return [float(len(text.split())) for text in completions]
        >>> reward = ConstitutionReward(length, members=[PatternReward(forbidden=["password"])], cap=-1.0)
        >>> reward(prompts=["Help!"] * 2, completions=["Restart it.", "Send me your password now."])
        [2.0, -1.0]
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
            raise ValueError("there is no principle: give `members`, a `judge`, or both")
        minimums = [*minimum] if isinstance(minimum, (list, tuple)) else [minimum] * len(members)
        if len(minimums) != len(members):
            raise ValueError(f"`minimum` must be a number, or one for each of {len(members)} members, got {minimum}")
        check_finite(cap=cap, judge_minimum=judge_minimum)
        for value in minimums:
            check_finite(minimum=value)
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

    def __call__(
        self, prompts: list, completions: list, completion_ids: Any = None, log_metric: Any = None, **kwargs: Any
    ) -> list[float | None]:
        """Return each completion's score, capped if the completion breaks a principle; None if it has no score."""
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
            columns["log_extra"] = lambda *_, **__: None  # its table wants all rows
            given = self._judge(log_metric=log_metric, **of_rows(columns, rows, count))
            note(self._names[-1], self.judge_minimum, rows, given)
        for row, score in enumerate(scores):
            has_failed = score is not None and math.isnan(score)
            if has_failed or unchecked[row] and not breaks[row]:
                scores[row] = None
            elif breaks[row]:
                scores[row] = self.cap if score is None else min(score, self.cap)
        left_out = sum(not broken and not_known for broken, not_known in zip(breaks, unchecked, strict=True))
        shares |= {"violations": sum(breaks) / count, "unchecked": left_out / count}
        log_to(log_metric, shares, self)
        return scores
