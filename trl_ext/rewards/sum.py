"""Several reward functions as one: their weighted sum."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean, pstdev
from typing import Any

from .member import Member, OnError, distinct, is_finite_number, log_to, scores_of_all
from .naming import checked_name


class SumReward:
    """
    Add up several reward functions: Σ_k weight_k · (score_k − mean_k) / std_k.

    A member that gives None for a row does not apply to it and takes no part; where no member with a weight applies,
    the row's score is None. It is None, too, where a member with a weight fails and is skipped: without what that one
    takes off, the sum would be too high. Logs `rewards/<name>/<member>/mean` and `…/std`, of the members' own scores:
    what `means` and `stds` can be set to. Members in background run at the same time, in threads.

    Args:
        members: reward functions, async or not.
        weights: of the members; 1 each if unset. A member of weight 0 is only logged.
        means, stds: what each member's scores are standardised by; 0 and 1 if unset. They are fixed numbers, so that a
            score depends on nothing but its row: moments of the run so far would differ between processes.
        on_error: of a member that fails, see [`~trl_ext.rewards.member.Member`]: `"raise"`, `"skip"` (the row has no
            score) or the member's score. Of a member whose own `on_error` is `"skip"`, each None counts as failed.
        name: in the logs; `sum_` and the members' names if unset.

    Raises:
        TypeError, ValueError: what is given is none of these.
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

    @property
    def in_background(self) -> bool:
        """Whether the time of any member goes by elsewhere."""
        return any(member.in_background for member in self.members)

    def __call__(
        self, prompts: list, completions: list, log_metric: Any = None, log_extra: Any = None, **kwargs: Any
    ) -> list[float | None]:
        """Return the weighted sum for each completion, None where no member gives a score, or one fails."""
        kwargs = {"prompts": prompts, "completions": completions, **kwargs}
        scores = scores_of_all(self.members, log_metric, log_extra, **kwargs)
        for name, given in zip(self.names, scores, strict=True):
            numbers = [score for score in given if score is not None and not math.isnan(score)]
            if numbers:
                where = f"rewards/{self.__name__}/{name}"
                log_to(log_metric, {f"{where}/mean": fmean(numbers), f"{where}/std": pstdev(numbers)})
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
