"""Call reward functions from within another reward, and handle their failures."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from transformers.utils import logging

from ..upstream.names import get_callable_name
from .background import Started, awaited, rewards_within, runs_in_background
from .scores import is_nan, log_to, number_or_error, scores_in, without_failures

logger = logging.get_logger(__name__)

OnError = Literal["raise", "skip"]
FAILED = math.nan
_warned: set[tuple[str, bool]] = set()  # a reward's name, and whether it failed on all rows


class RewardFailed(RuntimeError):
    """Raised when a reward function failed; the message says which function and why, so no traceback is needed."""


class MarksFailures:
    """
    Base class of rewards that distinguish rows on which they failed from rows that they do not apply to.

    A subclass defines `scores_or_nan`, which returns NaN for a row on which the reward failed, and None for a row that
    it does not apply to. A call of the reward returns None for both.
    """

    scores_or_nan: Callable[..., list[float | None]]  # as `__call__`, but NaN, not None, for a row that failed

    def __call__(self, prompts: list, completions: list, *args: Any, **kwargs: Any) -> list[float | None]:
        """Return a finite number or None for each completion. The arguments are those of a reward function."""
        scores = self.scores_or_nan(prompts, completions, *args, **kwargs)
        return without_failures(scores) if self.marks_failures else scores

    @property
    def marks_failures(self) -> bool:
        """Return whether NaN marks a failed row; False for a wrapper of a reward that does not mark failures."""
        return True


class Member(MarksFailures):
    """
    Call a reward function for another reward, and handle its failures.

    The function may have any of TRL's signatures, async or not. It fails on a row if its score there is neither None
    nor a finite number. It fails on all rows of a call if it raises an exception, or returns more or fewer scores than
    there are completions.

    Args:
        on_error: `"raise"` raises a `RuntimeError` that names the function, and the completion if one score is wrong.
            `"skip"` scores a failed row None; the combining reward then gives the row no higher score than it would
            have had without the failure, and the share of failed rows is logged as `rewards/<name>/failed`.

    Examples:
        >>> from trl_ext.rewards import Member
        >>> def digits(completions, **kwargs):
        ...     return [float(text) for text in completions]
        >>> Member(digits, on_error="skip")(prompts=["1 + 1", "2 + 2"], completions=["2", "4"])
        [2.0, 4.0]
    """

    def __init__(self, function: Callable, on_error: OnError = "raise"):
        self.function = function
        self.on_error = checked_on_error(on_error)

    def held(self) -> list:
        """Return the rewards that this reward calls."""
        return [self.function]

    @property
    def name(self) -> str:
        """Return the function's name."""
        return get_callable_name(self.function)

    def scores_or_nan(
        self, prompts: list, completions: list, log_metric: Any = None, **kwargs: Any
    ) -> list[float | None]:
        """
        Return the scores as `__call__` does, but NaN instead of None where the function failed and was skipped.
        `log_metric` is TRL's function that logs; None logs nothing.
        """
        kwargs = {"prompts": prompts, "completions": completions, "log_metric": log_metric, **kwargs}
        try:
            scores = scores_in(awaited(scorer(self.function)(**kwargs)), len(completions))
            outcomes = [
                FAILED if failed else number_or_error(score, f"completion {row}")
                for row, (score, failed) in enumerate(zip(scores, failed_rows(self.function, scores), strict=True))
            ]
        except Exception as error:
            outcomes = [error] * len(completions)
        return with_failures_as_nan(self.name, outcomes, self.on_error, log_metric)


def returns_nan(function: Any) -> bool:
    """Return whether a reward function marks failed rows by NaN, see [`MarksFailures`]."""
    return isinstance(function, MarksFailures) and function.marks_failures


def scorer(function: Any) -> Callable:
    """Return the function to call for scores: `scores_or_nan` of a [`MarksFailures`], else the reward function."""
    return function.scores_or_nan if returns_nan(function) else function


def failed_rows(function: Callable, scores: Sequence[Any]) -> list[bool]:
    """
    Return for each of the `scores` whether the reward function failed on that row. The scores are those that the
    function from [`scorer`] returned.

    A [`MarksFailures`] marks failed rows by NaN. Any other function gives a failed row None if it, or a reward that it
    holds, has `on_error="skip"`. This None looks like "does not apply", so every None that such a function returns
    counts as a failure.
    """
    if returns_nan(function):
        return list(map(is_nan, scores))
    skips = "skip" in [getattr(each, "on_error", "") for each in (function, *rewards_within(function))]
    return [skips and score is None for score in scores]


def with_failures_as_nan(
    name: str, outcomes: Sequence[Any], on_error: OnError, log_metric: Any, may_raise: bool = True
) -> list[float | None]:
    """
    Return a call's outcomes with NaN in place of each error; if `on_error` is `"raise"`, raise the first error.

    Log the share of errors. Warn when a reward first fails, and when it first fails on all completions of a call,
    since the run may then train on nothing.

    Args:
        outcomes: for each completion its score, or an exception.
        log_metric: TRL's function that logs a metric; None logs nothing.
        may_raise: if False, no error is raised, whatever `on_error` is.
    """
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    if errors and on_error == "raise" and may_raise:
        raise _named(name, errors[0]) from errors[0]
    if outcomes and (errors or on_error != "raise"):
        log_to(log_metric, {f"rewards/{name}/failed": len(errors) / len(outcomes)})
    if errors and (key := (name, len(errors) == len(outcomes))) not in _warned:
        _warned.add(key)
        logger.warning(f"reward '{name}' failed on {len(errors)} of {len(outcomes)} completions: {errors[0]}")
    return [FAILED if isinstance(outcome, Exception) else outcome for outcome in outcomes]


def scores_of_all(
    members: Sequence[Member], log_metric: Any = None, log_extra: Any = None, **kwargs: Any
) -> list[list[float | None]]:
    """
    Call each member as a reward function. Return a list of scores for each member, in the order of `members`, with NaN
    where the member failed and was skipped.

    Members that wait for something else, see [`runs_in_background`], run in threads, at the same time as the others.

    Args:
        log_metric, log_extra: TRL's functions that log; None logs nothing.
        **kwargs: what a trainer passes to a reward function: `prompts`, `completions`, the dataset's columns.
    """
    loggers = {"log_metric": log_metric, "log_extra": log_extra}
    waits = [*map(runs_in_background, members)]
    started = {m: Started(member.scores_or_nan, **kwargs) for m, member in enumerate(members) if waits[m]}
    here = {m: member.scores_or_nan(**kwargs, **loggers) for m, member in enumerate(members) if m not in started}
    return [here[m] if m in here else started[m].result(**loggers) for m in range(len(members))]


def _named(name: str, error: Exception) -> RuntimeError:
    """Return the error to raise for a reward's `error`: the message begins with the reward's name, but only once."""
    own = f"reward '{name}': "
    message = str(error).removeprefix(own)
    if isinstance(error, RewardFailed):
        return RewardFailed(own + message)
    return RuntimeError(own + (message if str(error).startswith(own) else f"{type(error).__name__}: {message}"))


def distinct(names: Sequence[str]) -> list[str]:
    """
    Make names distinct, since metrics are kept by name: append its list index to each name that occurs more than once.

    >>> distinct(["length", "tone", "length"])
    ['length_0', 'tone', 'length_2']
    """
    numbered = [name if names.count(name) == 1 else f"{name}_{place}" for place, name in enumerate(names)]
    return numbered if len(set(numbered)) == len(numbered) else distinct(numbered)  # `a_0` may be a member's own name


def checked_name(name: str | None, default: str) -> str:
    """Return a reward's key in the logs: `name`; if None, `default` with `_` for characters that keys cannot have."""
    return name or re.sub(r"_?[^\w.-]+_?", "_", default, flags=re.ASCII).strip("_") or "reward"


def checked_on_error(on_error: OnError) -> OnError:
    """Return `on_error`; raise now for an invalid word, rather than at the first failure."""
    if on_error not in ("raise", "skip"):
        raise ValueError(f"`on_error` is {on_error!r}: give 'raise' or 'skip'")
    return on_error
