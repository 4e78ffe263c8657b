"""Combine several reward functions that score the same thing."""

import inspect
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from ..functional import disagreement, ensemble_score
from ..functional.ensemble import Combine
from ..runs.nearest import did_you_mean
from .checks import OnError, checked_name
from .member import HoldsRewards, Member, log_to, scores_of_all, without_failures
from .model import ModelReward


class EnsembleReward(HoldsRewards):
    """
    Score answers by several reward functions that measure the same thing, and log how much they disagree.

    Logs `rewards/<name>/disagreement`, the standard deviation of the members' scores of an answer, averaged over the
    answers. [`~trl_ext.callbacks.RewardDisagreementCallback`] alerts when it grows.

    If any member scores a row None, the row's score is None, whatever `combine` is. Otherwise an answer could gain by
    a failure: without the lowest member's score, the others' mean or minimum is higher. For members that judge
    different things use [`SumReward`]. Members that wait for a server or other processes run at the same time, in
    threads.

    Args:
        members: a list of two or more reward functions, or folders or hub names of reward models; or the one folder
            that `recipes/reward.py --ensemble k` wrote. Adapters of the same base model share one copy of it.
        combine: `"mean"`, `"median"`, `"min"` (the worst case) or `"uncertainty"`, the mean minus `uncertainty_coef`
            times the members' standard deviation.
        uncertainty_coef: factor >= 0 of the standard deviation, only with `"uncertainty"`; 1 if None.
        max_disagreement: largest standard deviation of the members' scores of a row. A row above it scores None, and
            the share of rows above it is logged as `rewards/<name>/rejected`. None: no limit.
        normalize: standardise each member's scores by their mean and standard deviation on the held-out answers that
            the recipe scored, for members of different scales. Only if `members` is the recipe's folder.
        on_error: what happens if a member fails, see [`~trl_ext.rewards.member.Member`]. `"skip"` leaves the row
            without a score; a number is the failed member's score, and should be below its scores of bad answers.
        model_kwargs: arguments of [`ModelReward`] for the members given by folder or hub name, such as
            `{"dtype": "bfloat16"}`.
        name: key in the logs; if None, `combine` and the members' names, such as `min_of_a_b`.

    Raises:
        ValueError: a setting is out of its range, there are fewer than two members, or the folder holds no ensemble.

    Examples:
        >>> from trl_ext.rewards import EnsembleReward
        >>> def strict(completions, **kwargs):
        ...     return [0.0 if "maybe" in text else 1.0 for text in completions]
        >>> def mild(completions, **kwargs):
        ...     return [0.5 if "maybe" in text else 1.0 for text in completions]
        >>> EnsembleReward([strict, mild], combine="min")(prompts=["Rain?"] * 2, completions=["Yes.", "Well, maybe."])
        [1.0, 0.0]
    """

    def __init__(
        self,
        members: str | Sequence[Callable | str],
        combine: Combine = "mean",
        uncertainty_coef: float | None = None,
        max_disagreement: float | None = None,
        normalize: bool = False,
        on_error: OnError = "raise",
        model_kwargs: dict[str, Any] | None = None,
        name: str | None = None,
    ):
        if combine not in get_args(Combine):
            raise ValueError(f"`combine` must be one of {', '.join(get_args(Combine))}, got {combine!r}")
        for argument, value in (("uncertainty_coef", uncertainty_coef), ("max_disagreement", max_disagreement)):
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"`{argument}` must be a finite number >= 0, got {value}")
        if uncertainty_coef is not None and combine != "uncertainty":
            raise ValueError(
                f"`uncertainty_coef` works only with combine='uncertainty', got combine={combine!r}: leave it out"
            )
        if normalize and not isinstance(members, str):
            raise ValueError(
                f"`normalize` needs an ensemble's folder as `members`, got {members!r}. `recipes/reward.py --ensemble "
                "k` writes such a folder"
            )
        check_model_kwargs(model_kwargs)
        facts: list[dict[str, Any]] = []
        called = ""
        if isinstance(members, str):
            called, facts = Path(members).resolve().name, members_in(members)
            members = [str(Path(members, member["folder"])) for member in facts]
            if flat := [member["folder"] for member in facts if normalize and not member["std"] > 0]:
                raise ValueError(
                    f"`normalize` divides by the standard deviation of a member's scores, but {flat[0]} gave all "
                    "answers one score. Train that member again, or leave `normalize` out"
                )
        if not isinstance(members, (list, tuple)) or len(members) < 2:
            raise ValueError(
                f"`members` must be a list of two or more rewards, or the folder of an ensemble, got {members!r}"
            )
        if model_kwargs and not any(isinstance(member, str) for member in members):
            raise ValueError(
                "`model_kwargs` is for members given by a path or hub name, and all members are functions: leave it "
                "out"
            )
        self.members = [Member(member, on_error) for member in loaded(members, model_kwargs or {})]
        self.combine = combine
        self.uncertainty_coef = 1.0 if uncertainty_coef is None else uncertainty_coef
        self.max_disagreement = max_disagreement
        self.scales = [(member["mean"], member["std"]) for member in facts] if normalize else None
        of = called or "_".join(member.name for member in self.members)
        self.__name__ = checked_name(name, f"{combine}_of_{of}")

    def __call__(
        self,
        prompts: list,
        completions: list,
        completion_ids: list[list[int]] | None = None,
        log_metric: Any = None,
        **kwargs: Any,
    ) -> list[float | None]:
        """Return each completion's combined score; None if a member has none, or they disagree too much."""
        kwargs |= {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        if not prompts:
            return []
        members = scores_of_all(self.members, log_metric, **kwargs)
        rows = [[math.nan if score is None else score for score in scores] for scores in members]
        scores = torch.tensor(rows, dtype=torch.float64)
        if self.scales:
            mean, std = torch.tensor(self.scales, dtype=torch.float64).T[:, :, None]
            scores = (scores - mean) / std
        combined, spread = ensemble_score(scores, self.combine, self.uncertainty_coef), disagreement(scores)
        known = ~spread.isnan()
        metrics = {"disagreement": spread[known].mean().item()} if known.any() else {}
        if self.max_disagreement is not None:
            rejected = spread > self.max_disagreement
            combined[rejected] = math.nan
            metrics["rejected"] = rejected.double().mean().item()
        log_to(log_metric, metrics, self)
        return without_failures(combined.tolist())


def check_model_kwargs(model_kwargs: Any) -> None:
    """Raise a `ValueError` if a name in `model_kwargs` is not an argument of [`ModelReward`]."""
    if not isinstance(model_kwargs, (dict, type(None))):
        raise ValueError(f"`model_kwargs` must be a mapping of names to values, got {model_kwargs!r}")
    known = set(inspect.signature(ModelReward).parameters) - {"model", "shared_base"}
    for name in model_kwargs or {}:
        if name not in known:
            nearest = did_you_mean(str(name), known) or f"; it has {', '.join(sorted(known))}"
            raise ValueError(f"`model_kwargs`: ModelReward has no argument {name!r}{nearest}")


def members_in(folder: str) -> list[dict[str, Any]]:
    """Return `{"folder", "mean", "std"}` of each member, from `ensemble.json`; raise a `ValueError` without it."""
    file = Path(folder, "ensemble.json")
    if not file.is_file():
        raise ValueError(
            f"{folder} has no ensemble.json. Give the folder of a finished run of `recipes/reward.py --ensemble k`, "
            "or a list of members"
        )
    return json.loads(file.read_text())["members"]


def loaded(members: Sequence[Callable | str], model_kwargs: dict[str, Any]) -> list[Callable]:
    """Load the members that are folders or hub names; return all members. Adapters of one base share a copy of it."""
    from ..models.loading import SharedBase, base_named_by, is_adapter

    bases = [base_named_by(member) if isinstance(member, str) and is_adapter(member) else None for member in members]
    shared = {base: SharedBase() if base and count > 1 else None for base, count in Counter(bases).items()}
    return [
        ModelReward(member, shared_base=shared[base], **model_kwargs) if isinstance(member, str) else member
        for member, base in zip(members, bases, strict=True)
    ]
