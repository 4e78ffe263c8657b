"""Add up several reward functions with weights."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean, pstdev
from typing import Any

from ..runs.jsonl import is_finite_number
from .checks import OnError, checked_name
from .member import HoldsRewards, Member, distinct, log_to, scores_of_all


class SumReward(HoldsRewards):
    """
    Add up the standardised scores of several reward functions: Σ_k weight_k · (score_k − mean_k) / std_k.

    A member that returns None for a row does not apply to the row, and is left out of its sum. A row scores None if no
    member whose weight is not 0 applies to it, or if such a member fails and is skipped: otherwise the sum might lack
    a penalty. Members that wait for a server or other processes run at the same time, in threads.

    Logs `rewards/<name>/<member>/mean` and `rewards/<name>/<member>/std` of each member's own scores, before they are
    standardised. `means` and `stds` can be set to these numbers.

    Args:
        members: reward functions, async or not.
        weights: one for each member; 1 if unset. A member of weight 0 is only logged.
        means, stds: mean and standard deviation of each member, which standardise its scores; 0 and 1 if
            unset. They are fixed, so that a score depends on nothing but its row; the mean and deviation of the run's
            scores so far would differ between processes.
        on_error: what happens if a member fails, see [`~trl_ext.rewards.member.Member`]. `"raise"` raises an error,
            `"skip"` leaves the row without a score, a number is the failed member's score. If a member's own
            `on_error` is `"skip"`, each None that it returns counts as a failure.
        name: key in the logs; `sum_` and the members' names if unset.

    Raises:
        TypeError, ValueError: an argument is not as described.

    Examples:
        >>> from trl_ext.rewards import PatternReward, SumReward
        >>> def shortness(completions, **kwargs):
        ...     return [-float(len(text.split())) for text in completions]
        >>> reward = SumReward([PatternReward(required=["please"]), shortness], weights=[10.0, 1.0])
        >>> reward(prompts=["Ask.", "Ask."], completions=["More tea, please!", "More tea!"])
        [7.0, -2.0]
    """

    def __init__(
        self,
        members: Sequence[Callable],
        weights: Sequence[float] | None = None,
        means: Sequence[float] | None = None,
        stds: Sequence[float] | None = None,
        on_error: OnError = "raise",
        name: str | None = None,
    ):
        if not isinstance(members, (list, tuple)) or not members:
            raise ValueError(f"`members` must be a list of one or more reward functions, got {members!r}")
        self.members = [Member(member, on_error) for member in members]
        self.weights = _numbers("weights", weights, len(members), 1.0)
        self.means = _numbers("means", means, len(members), 0.0)
        self.stds = _numbers("stds", stds, len(members), 1.0)
        if not all(std > 0 for std in self.stds):
            raise ValueError(f"`stds` must be above 0, got {self.stds}")
        self.names = distinct([member.name for member in self.members])
        self.__name__ = checked_name(name, "_".join(["sum", *self.names]))

    def __call__(
        self, prompts: list, completions: list, log_metric: Any = None, log_extra: Any = None, **kwargs: Any
    ) -> list[float | None]:
        """Return each completion's weighted sum; None if no weighted member gives a score, or one fails."""
        kwargs = {"prompts": prompts, "completions": completions, **kwargs}
        scores = scores_of_all(self.members, log_metric, log_extra, **kwargs)
        for name, given in zip(self.names, scores, strict=True):
            numbers = [score for score in given if score is not None and not math.isnan(score)]
            if numbers:
                log_to(log_metric, {f"{name}/mean": fmean(numbers), f"{name}/std": pstdev(numbers)}, self)
        return [self._sum(row) for row in zip(*scores, strict=True)]

    def _sum(self, row: tuple[float | None, ...]) -> float | None:
        members = zip(row, self.weights, self.means, self.stds, strict=True)
        parts = [w * (score - mean) / std for score, w, mean, std in members if score is not None and w != 0]
        return None if not parts or math.isnan(total := sum(parts)) else total


def _numbers(name: str, given: Any, count: int, default: float) -> list[float]:
    if given is None:
        return [default] * count
    if not (isinstance(given, (list, tuple)) and len(given) == count and all(map(is_finite_number, given))):
        raise ValueError(f"`{name}` must be a list of {count} finite numbers, one for each member, got {given!r}")
    return [float(x) for x in given]
