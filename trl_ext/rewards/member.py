"""Call a reward function from within another reward: check what it returns, and handle its failures."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from transformers.utils import logging

from ..upstream.names import get_callable_name
from .background import Started, awaited, runs_in_background
from .scores import log_to, number_or_error, scores_in, without_failures

logger = logging.get_logger(__name__)

OnError = Literal["raise", "skip"] | float
FAILED = float("nan")  # this one object means "failed"; a NaN that a function returns is another object
_warned: set[tuple[str, bool]] = set()  # a reward's name, and whether it failed on all rows


class RewardFailed(RuntimeError):
    """Say which reward function failed and why, for an error that needs no traceback."""


class TellsFailures:
    """Tell rows that a reward failed on (NaN) from rows that it does not apply to (None): a base class of rewards."""

    def __call__(self, prompts: list, completions: list, *args: Any, **kwargs: Any) -> list[float | None]:
        """Return a finite number or None for each completion."""
        return without_failures(self.scores_or_nan(prompts, completions, *args, **kwargs))

    def scores_or_nan(self, prompts: list, completions: list, *args: Any, **kwargs: Any) -> list[float | None]:
        """Return the scores as `__call__` does, but with NaN, not None, for a row that failed."""
        raise NotImplementedError


class HoldsRewards:
    """Hold other rewards in the attributes `reward`, `members`, `judge` or `function`: a base class of rewards."""

    @property
    def in_background(self) -> bool:
        """Return whether a reward that this one holds runs in the background, see [`runs_in_background`]."""
        return any(map(runs_in_background, rewards_within(self)))


def rewards_within(reward: Any) -> Iterator[Any]:
    """Yield each reward function that a reward holds, at any depth."""
    held = getattr(reward, "__dict__", {})  # `getattr` would ask a proxy, which has every attribute
    members = held.get("members")
    for each in (*map(held.get, ("reward", "judge", "function")), *(members if isinstance(members, list) else ())):
        if each is not None:
            yield each
            yield from rewards_within(each)


class Member(TellsFailures, HoldsRewards):
    """
    Call a reward function for another reward, and handle its failures.

    The function may have any of TRL's signatures, async or not. It fails on a row if its score there is neither None
    nor a finite number. It fails on all rows of a call if it raises an exception, or returns more or fewer scores than
    there are completions.

    Args:
        function: the reward function.
        on_error: `"raise"` raises a `RuntimeError` that names the function, and the completion if one score is wrong.
            `"skip"` scores a failed row None; the reward that holds the function then gives the row no higher score
            than it would have had without the failure. A number is the score of a failed row. With `"skip"` or a
            number, the share of failed rows is logged as `rewards/<name>/failed`.

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

    @property
    def name(self) -> str:
        """Return the function's name."""
        return get_callable_name(self.function)

    def scores_or_nan(
        self, prompts: list, completions: list, log_metric: Any = None, **kwargs: Any
    ) -> list[float | None]:
        """Return the scores as `__call__` does, but with NaN where the function failed and was skipped."""
        kwargs = {"prompts": prompts, "completions": completions, "log_metric": log_metric, **kwargs}
        try:
            outcomes = _answers(self.function, len(completions), kwargs)
        except Exception as error:
            outcomes = [error] * len(completions)
        return settled(self.name, outcomes, self.on_error, log_metric)


def _answers(function: Callable, count: int, kwargs: dict[str, Any]) -> list[Any]:
    """
    Call a reward function; return for each completion its score, an error, or [`FAILED`].

    A [`TellsFailures`] marks failed rows by NaN. Any other function gives a failed row None if it, or a reward that it
    holds, has `on_error="skip"`. We cannot tell this None from "does not apply", so each None that such a function
    returns counts as a failure.
    """
    tells = function if isinstance(function, TellsFailures) else None
    returned = tells.scores_or_nan(**kwargs) if tells else awaited(function(**kwargs))
    skips = not tells and "skip" in [getattr(each, "on_error", "") for each in (function, *rewards_within(function))]

    def checked(score: Any, row: int) -> Any:
        if score is None:
            return FAILED if skips else None
        if tells and math.isnan(score):
            return FAILED
        return number_or_error(score, row)

    return [checked(score, row) for row, score in enumerate(scores_in(returned, count))]


def settled(
    name: str, outcomes: Sequence[Any], on_error: OnError, log_metric: Any, excused: Any = ()
) -> list[float | None]:
    """
    Return a call's outcomes, each error replaced by NaN if `on_error` is `"skip"`, or by the number `on_error`.

    Log the share of errors, and warn when a reward first fails, and when it first fails on all completions of a call:
    the run may then train on nothing.

    Args:
        name: name of the reward.
        outcomes: for each completion its score, or an exception.
        on_error: see [`Member`]. With `"raise"` the first error is raised.
        log_metric: TRL's function that logs a metric.
        excused: classes of exceptions that are replaced by NaN, whatever `on_error` is.
    """
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    if on_error == "raise" and (mistakes := [error for error in errors if not isinstance(error, excused)]):
        raise failure(name, mistakes[0]) from mistakes[0]
    if outcomes and (errors or on_error != "raise"):
        log_to(log_metric, {f"rewards/{name}/failed": len(errors) / len(outcomes)})
    if errors and (key := (name, len(errors) == len(outcomes))) not in _warned:
        _warned.add(key)
        logger.warning(f"reward '{name}' failed on {len(errors)} of {len(outcomes)} completions: {errors[0]}")
    number = FAILED if on_error in ("raise", "skip") else float(on_error)
    fallbacks = [FAILED if isinstance(outcome, excused) else number for outcome in outcomes]
    return [
        fallback if isinstance(outcome, Exception) else outcome
        for outcome, fallback in zip(outcomes, fallbacks, strict=True)
    ]


def scores_of_all(
    members: Sequence[Member], log_metric: Any = None, log_extra: Any = None, **kwargs: Any
) -> list[list[float | None]]:
    """
    Return each member's list of scores, as [`Member.scores_or_nan`] returns it.

    Members with a true `in_background` run in threads, at the same time as the others.
    """
    loggers = {"log_metric": log_metric, "log_extra": log_extra}
    started = {m: Started(member.scores_or_nan, **kwargs) for m, member in enumerate(members) if member.in_background}
    here = {m: member.scores_or_nan(**kwargs, **loggers) for m, member in enumerate(members) if m not in started}
    return [here[m] if m in here else started[m].result(**loggers) for m in range(len(members))]


def failure(name: str, error: Exception) -> RuntimeError:
    """Return an error with the name of the reward function and the message of `error`."""
    kind = RewardFailed if isinstance(error, RewardFailed) else RuntimeError
    return kind(f"reward '{name}': {message_of(name, error)}")


def message_of(name: str, error: Exception) -> str:
    """
    Return an error's message without `reward '<name>': ` before it.

    If the message lacks that prefix, put the error's type before it, unless the error is a [`RewardFailed`].
    """
    message, own = str(error), f"reward '{name}': "
    if message.startswith(own) or isinstance(error, RewardFailed):
        return message.removeprefix(own)
    return f"{type(error).__name__}: {message}"


def distinct(names: Sequence[str]) -> list[str]:
    """
    Make names different, since metrics are kept by name: a name that occurs more than once gets its place in the list.

    >>> distinct(["length", "tone", "length"])
    ['length_0', 'tone', 'length_2']
    """
    numbered = [name if names.count(name) == 1 else f"{name}_{place}" for place, name in enumerate(names)]
    return numbered if len(set(numbered)) == len(numbered) else distinct(numbered)  # `a_0` may be a member's own name


def checked_name(name: str | None, default: str) -> str:
    """Return a reward's key in the logs: `name`, or `default` with `_` in place of what no metric's name has."""
    return name or re.sub(r"_?[^\w.-]+_?", "_", default, flags=re.ASCII).strip("_") or "reward"


def checked_on_error(on_error: Any) -> OnError:
    """Return `on_error`, a number as a float; a mistyped word is an error now, and not at the first failure."""
    return on_error if on_error in ("raise", "skip") else float(on_error)
