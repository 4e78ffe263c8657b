"""Several reward functions that score the same thing, as one."""

import math
from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch

from ..functional import disagreement, ensemble_score
from ..functional.ensemble import Combine
from .member import Member, OnError, log_to


class EnsembleReward:
    """
    Score answers by several reward functions that were made to say the same, and tell where they disagree.

    `rewards/<name>/disagreement` is logged: the standard deviation of the members' scores of an answer, on average.
    [`~trl_ext.callbacks.RewardDisagreementCallback`] alerts when it grows.

    A member that scores None takes no part in that row; where all do, the row's score is None.

    Args:
        members: two or more reward functions.
        combine: `"mean"`, `"median"`, `"min"` (the worst case) or `"uncertainty"`, the mean minus `uncertainty_coef`
            times the members' standard deviation.
        uncertainty_coef: >= 0, only with `"uncertainty"`; 1 if None.
        max_disagreement: a row whose members' standard deviation is larger scores None, so that it counts for nothing
            if no other reward function scores it. The share of such rows is logged as `rewards/<name>/rejected`.
        on_error: what becomes of a member that fails, see [`~trl_ext.rewards.member.Member`].
        name: under which it is logged; `min_of_a_b` if None.

    Raises:
        ValueError: a setting is out of its range, or there are fewer than two members.
    """

    def __init__(
        self,
        members: Sequence[Callable],
        combine: Combine = "mean",
        uncertainty_coef: float | None = None,
        max_disagreement: float | None = None,
        on_error: OnError = "raise",
        name: str | None = None,
    ):
        if combine not in get_args(Combine):
            raise ValueError(f"`combine` must be one of {', '.join(get_args(Combine))}, got {combine!r}")
        for argument, value in (("uncertainty_coef", uncertainty_coef), ("max_disagreement", max_disagreement)):
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"`{argument}` must be a finite number >= 0, got {value}")
        if uncertainty_coef is not None and combine != "uncertainty":
            raise ValueError(f"`uncertainty_coef` does nothing with combine={combine!r}: use 'uncertainty', or drop it")
        if len(members) < 2:
            raise ValueError(f"an ensemble needs two members or more, got {len(members)}")
        self.members = [Member(member, on_error) for member in members]
        self.combine = combine
        self.uncertainty_coef = 1.0 if uncertainty_coef is None else uncertainty_coef
        self.max_disagreement = max_disagreement
        self.__name__ = name or f"{combine}_of_{'_'.join(member.name for member in self.members)}"

    @property
    def in_background(self) -> bool:
        """Whether the time of a member goes by elsewhere."""
        return any(member.in_background for member in self.members)

    def __call__(self, prompts: list, completions: list, log_metric: Any = None, **kwargs: Any) -> list[float | None]:
        """Return the ensemble's score of each completion; None where no member has one, or they disagree too much."""
        kwargs = {"prompts": prompts, "completions": completions, "log_metric": log_metric, **kwargs}
        rows = [[math.nan if s is None else s for s in member(**kwargs)] for member in self.members]
        scores = torch.tensor(rows, dtype=torch.float64)
        combined, spread = ensemble_score(scores, self.combine, self.uncertainty_coef), disagreement(scores)
        said = ~spread.isnan()
        metrics = {"disagreement": spread[said].mean().item()} if said.any() else {}
        if self.max_disagreement is not None and len(prompts):
            rejected = spread > self.max_disagreement
            combined[rejected] = math.nan
            metrics["rejected"] = rejected.double().mean().item()
        log_to(log_metric, {f"rewards/{self.__name__}/{key}": value for key, value in metrics.items()})
        return [None if math.isnan(score) else score for score in combined.tolist()]
