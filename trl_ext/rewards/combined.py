"""
Combine reward functions: combine an ensemble's scores, or cap the score of completions that break a rule.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from ..functional import Combine, disagreement, ensemble_score
from .member import FAILED, MarksFailures, Member, OnError, checked_name, distinct, scores_of_all
from .scores import log_to, of_rows, without_failures


class EnsembleReward(MarksFailures):
    """
    Score completions by several reward functions that measure the same thing, and log how much they disagree.

    Logs `rewards/<name>/disagreement`, the standard deviation of the members' scores of a completion, averaged over
    the completions. [`~trl_ext.callbacks.RewardDisagreementCallback`] alerts when it grows.

    If any member scores a row None, the row's score is None, whatever `combine` is. Otherwise a completion could gain
    by a failure: without the lowest score, the mean or minimum of the other scores is higher. For the same reason PPO
    does not train on the row, whatever other rewards give it, unless all members score it None. For members that judge
    different things, pass a list of rewards to the trainer. Members that wait for a server or other processes run at
    the same time, in threads.

    Args:
        members: a list of two or more reward functions, or folders or hub names of reward models; or the one folder
            that `recipes/reward.py --ensemble k` wrote. Adapters of the same base model share one copy of it.
        combine: `"mean"`, `"median"`, `"min"` (the worst case) or `"uncertainty"`, the mean minus `uncertainty_coef`
            times the members' standard deviation.
        uncertainty_coef: factor >= 0 of the standard deviation, with `"uncertainty"`.
        max_disagreement: largest standard deviation of the members' scores of a row. A row above it scores None, and
            PPO does not train on it. The share of such rows is logged as `rewards/<name>/rejected`. None: no limit.
        normalize: standardise each member's scores, for members of different scales. Their means and standard
            deviations are read from the recipe's folder, which measured them on held-out completions.
        on_error: what happens if a member fails, see [`~trl_ext.rewards.member.Member`]. `"skip"` leaves the row
            without a score.
        model_kwargs: arguments of [`ModelReward`] for the members given by folder or hub name, such as
            `{"dtype": "bfloat16"}`.
        name: key in the logs; if None, `combine` and the names of the members, such as `min_of_a_b`, or of their one
            folder.

    Raises:
        ValueError: `normalize` is set, but `members` is not the folder of an ensemble, which has the scales.

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
        uncertainty_coef: float = 1.0,
        max_disagreement: float | None = None,
        normalize: bool = False,
        on_error: OnError = "raise",
        model_kwargs: dict[str, Any] | None = None,
        name: str | None = None,
    ):
        if normalize and not isinstance(members, str):
            raise ValueError(
                "`normalize` needs the members' scales: as `members`, pass the folder that `recipes/reward.py "
                "--ensemble` wrote"
            )
        facts: list[dict[str, Any]] = []
        called = ""
        if isinstance(members, str):
            called = Path(members).resolve().name
            facts = json.loads(Path(members, "ensemble.json").read_text())["members"]
            members = [str(Path(members, member["folder"])) for member in facts]
        self.members = [Member(member, on_error) for member in _loaded(members, model_kwargs or {})]
        self.combine = combine
        self.uncertainty_coef = uncertainty_coef
        self.max_disagreement = max_disagreement
        self.scales = [(member["mean"], member["std"]) for member in facts] if normalize else None
        of = called or "_".join(member.name for member in self.members)
        self.__name__ = checked_name(name, f"{combine}_of_{of}")

    def held(self) -> list:
        """Return the rewards that this reward calls."""
        return self.members

    def scores_or_nan(
        self, prompts: list, completions: list, completion_ids: Any = None, log_metric: Any = None, **kwargs: Any
    ) -> list[float | None]:
        """
        Return each completion's combined score; None if no member applies to it; NaN if a member gives no score, or
        the members disagree too much.

        The arguments are those of a reward function; TRL's functions that log may be None.
        """
        if not prompts:
            return []
        kwargs |= {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        members = scores_of_all(self.members, log_metric, **kwargs)
        rows = [[math.nan if score is None else score for score in scores] for scores in members]
        scores = torch.tensor(rows, dtype=torch.float64)
        if self.scales:
            mean, std = torch.tensor(self.scales, dtype=torch.float64).T[:, :, None]
            scores = (scores - mean) / std
        combined = ensemble_score(scores, self.combine, self.uncertainty_coef)
        spread = disagreement(scores)
        known = ~spread.isnan()
        metrics = {"disagreement": spread[known].mean().item()} if known.any() else {}
        if self.max_disagreement is not None:
            rejected = spread > self.max_disagreement
            combined[rejected] = math.nan
            metrics["rejected"] = rejected.double().mean().item()
        log_to(log_metric, metrics, self)
        applies = [set(row) != {None} for row in zip(*members, strict=True)]
        return [score if row else None for row, score in zip(applies, combined.tolist(), strict=True)]


def _loaded(members: Sequence[Callable | str], model_kwargs: dict[str, Any]) -> list[Callable]:
    """Return all members, a [`ModelReward`] for each folder or hub name; adapters of one base share one copy of it."""
    from ..models.loading import SharedBase, base_named_by, is_adapter
    from .model import ModelReward

    revision = model_kwargs.get("revision")
    bases = [base_named_by(str(member), revision) if is_adapter(member, revision) else None for member in members]
    shared = {base: SharedBase() if base and count > 1 else None for base, count in Counter(bases).items()}
    return [
        ModelReward(member, shared_base=shared[base], **model_kwargs) if isinstance(member, str) else member
        for member, base in zip(members, bases, strict=True)
    ]


class ConstitutionReward(MarksFailures):
    """
    Cap the score of completions that break a principle.

    A principle is a reward function with a minimum. A completion breaks the principle if that function scores it below
    the minimum. Each completion's score is what `reward` gives it; if the completion breaks a principle, the score is
    at most `cap`, and is `cap` if `reward` does not apply. The `judge`, one more principle, is asked only about
    completions that break none of `members`, which should be cheap rules.

    If a principle gives a completion no score, and the completion breaks no other principle, it scores None, and PPO
    does not train on it, whatever other rewards give it. The same happens if `reward` fails on the completion and is
    skipped: the missing score might be below `cap`.

    Logs:

    - `rewards/<name>/violations`: share of completions that break a principle
    - `rewards/<name>/violations/<principle>`: share that break this principle, of the completions that it scored
    - `rewards/<name>/unchecked`: share of completions that score None because a principle gave them no score

    Args:
        reward: the reward function whose scores are capped.
        members: the principles: reward functions such as [`PatternReward`].
        cap: the highest score of a completion that breaks a principle. Choose one below what `reward` gives bad
            completions.
        minimum: the lowest score of a completion that keeps a principle: one number for all `members`, or a list with
            one for each.
        judge: a reward function, one more principle, which is asked last.
        judge_minimum: the lowest score that the judge gives a completion that keeps its principle.
        on_error: what happens if a function fails: `"raise"` raises an error, `"skip"` leaves the completion without
            that function's score.
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
        members: Sequence[Callable] = (),
        cap: float = 0.0,
        minimum: float | list[float] = 0.5,
        judge: Callable | None = None,
        judge_minimum: float = 0.5,
        on_error: OnError = "raise",
        name: str | None = None,
    ):
        self.reward = Member(reward, on_error)
        self.members = [Member(each, on_error) for each in members]
        self.cap = float(cap)
        self.minimum = [*minimum] if isinstance(minimum, (list, tuple)) else [minimum] * len(members)
        self.judge = None if judge is None else Member(judge, on_error)
        self.judge_minimum = judge_minimum
        self.names = distinct([principle.name for principle in self.held()[1:]])
        self.__name__ = checked_name(name, f"constitution_{self.reward.name}")

    def held(self) -> list:
        """Return the rewards that this reward calls: the reward, then the principles."""
        return [each for each in (self.reward, *self.members, self.judge) if each is not None]

    def scores_or_nan(
        self, prompts: list, completions: list, completion_ids: Any = None, log_metric: Any = None, **kwargs: Any
    ) -> list[float | None]:
        """
        Return each completion's score, capped if the completion breaks a principle; NaN if `reward` fails, or if a
        principle gives no score; None if neither `reward` nor a principle applies.

        The arguments are those of a reward function; TRL's functions that log may be None.
        """
        if not completions:
            return []
        count = len(completions)
        columns = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **kwargs}
        scores, *checked = scores_of_all([self.reward, *self.members], log_metric, **columns)
        # Whether each principle is broken in each row: None where it gave no score
        verdicts = [_verdicts(scored, minimum) for scored, minimum in zip(checked, self.minimum, strict=True)]
        if self.judge:
            asked = [row for row in range(count) if not any(broken[row] for broken in verdicts)]
            columns["log_extra"] = lambda *_, **__: None  # its table wants all rows
            rows = of_rows(columns, asked, count)
            judge_scores = self.judge.scores_or_nan(log_metric=log_metric, **rows) if asked else []
            judged = dict(zip(asked, judge_scores, strict=True))
            checked.append([judged.get(row) for row in range(count)])
            verdicts.append(_verdicts(checked[-1], self.judge_minimum))
        shares: dict[str, float | None] = {}
        for name, broken in zip(self.names, verdicts, strict=True):
            known = [is_broken for is_broken in broken if is_broken is not None]
            shares[f"violations/{name}"] = fmean(known) if known else None
        breaks = [any(row) for row in zip(*verdicts, strict=True)]
        unknown = [None in row and not any(row) for row in zip(*verdicts, strict=True)]
        for row, score in enumerate(scores):
            if unknown[row]:
                applies = {score, *(scored[row] for scored in checked)} != {None}
                scores[row] = FAILED if applies else None
            elif breaks[row]:
                if score is None:
                    scores[row] = self.cap
                elif not math.isnan(score):
                    scores[row] = min(score, self.cap)
        log_to(log_metric, shares | {"violations": fmean(breaks), "unchecked": fmean(unknown)}, self)
        return scores


def _verdicts(scores: list[float | None], minimum: float) -> list[bool | None]:
    """Return for each row whether its score breaks the principle; None if it has no score."""
    return [None if score is None else score < minimum for score in without_failures(scores)]
