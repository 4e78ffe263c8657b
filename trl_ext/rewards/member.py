"""Call a reward function from within another reward: check what it returns, and handle its failures."""

import asyncio
import inspect
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import torch
from transformers.utils import logging

from ..upstream.names import get_callable_name, is_async_callable
from .checks import OnError, check_on_error
from .segments import is_by_token

logger = logging.get_logger(__name__)

FAILED = float("nan")  # this one object means "failed"; a NaN that a function returns is another object
_failing: dict[str, str] = {}  # reward that has failed → "all" if all rows of its last call failed, else "some"
_LOOP = "async rewards"  # name of the thread that runs coroutines


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
        return any(map(runs_in_background, _held_by(self)))


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
        if not callable(function) or isinstance(function, type):
            raise TypeError(f"a member must be a reward function, got {function!r}")
        self.function = function
        self.on_error = check_on_error(on_error)

    @property
    def name(self) -> str:
        """Return the function's name."""
        return get_callable_name(self.function)

    def scores_or_nan(
        self, prompts: list, completions: list, log_metric: Any = None, **kwargs: Any
    ) -> list[float | None]:
        """
        Return the scores as `__call__` does, but with NaN for a row on which the function failed and was skipped.
        """
        kwargs = {"prompts": prompts, "completions": completions, "log_metric": log_metric, **kwargs}
        try:
            outcomes = answers_of(self.function, len(completions), **kwargs)
        except Exception as error:
            if self.on_error == "raise":
                raise failure(self.name, error) from error
            outcomes = [RewardFailed(message_of(self.name, error))] * len(completions)
        outcomes = [_checked_score(score, row) for row, score in enumerate(outcomes)]
        return settled(self.name, outcomes, self.on_error, log_metric)


def _checked_score(score: Any, row: int) -> Any:
    """
    Return a score as a float, and None, [`FAILED`] and a [`RewardFailed`] unchanged.

    For a wrong score return the `TypeError` or `ValueError` that says what is wrong with it.
    """
    if score is None or score is FAILED or isinstance(score, RewardFailed):
        return score
    if is_by_token(score):
        return TypeError(
            f"returned a score for each token of completion {row}, but inside another reward a function must return "
            "one score for a completion: pass this function to the trainer directly"
        )
    try:
        return finite_number(score, row)
    except (TypeError, ValueError) as error:
        return error


def settled(name: str, outcomes: Sequence[Any], on_error: OnError, log_metric: Any) -> list[float | None]:
    """
    Return a call's outcomes, with each error replaced by NaN if `on_error` is `"skip"`, or by the number `on_error`.

    Raises:
        RuntimeError: `on_error` is `"raise"`, and there is an error. The message is the first error's.
    """
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    if on_error == "raise":
        if errors:
            raise RuntimeError(f"reward '{name}': {errors[0]}") from errors[0]
        return list(outcomes)
    report_failures(name, len(errors), len(outcomes), str(errors[0]) if errors else "", log_metric)
    fallback = FAILED if on_error == "skip" else float(on_error)
    return [fallback if isinstance(outcome, Exception) else outcome for outcome in outcomes]


class Started:
    """
    Start a reward function in a thread of its own, and hold its scores until they are asked for.

    What the function logs is kept until [`Started.result`] is called, and logged then, in the caller's thread. The
    function's thread is daemonic: it does not keep the program from ending.

    Args:
        function: a reward function, async or not.
        **kwargs: the function's arguments, without `log_metric` and `log_extra`.
    """

    def __init__(self, function: Callable, **kwargs: Any):
        self._logged: list[tuple[str, tuple, dict]] = []
        self._scores: Future = Future()
        notes = {log: partial(self._note, log) for log in ("log_metric", "log_extra")}
        threading.Thread(target=self._run, args=(function, {**kwargs, **notes}), daemon=True).start()

    def _note(self, log: str, *args: Any, **kwargs: Any) -> None:
        self._logged.append((log, args, kwargs))

    def _run(self, function: Callable, kwargs: dict[str, Any]) -> None:
        try:
            self._scores.set_result(awaited(function(**kwargs)))
        except BaseException as error:  # else `result` would wait for ever
            self._scores.set_exception(error)

    def wait(self) -> None:
        """Wait until the function has returned, or failed."""
        self._scores.exception()

    def result(self, log_metric: Callable | None = None, log_extra: Callable | None = None) -> Any:
        """Wait for the function to end, and pass its logs on. Return its result, or raise its error."""
        try:
            return self._scores.result()
        finally:
            loggers = {"log_metric": log_metric, "log_extra": log_extra}
            for log, args, kwargs in self._logged:
                if (logger := loggers[log]) is not None:
                    logger(*args, **kwargs)


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


def failure(name: str, error: Exception, where: str = "") -> RuntimeError:
    """Return an error with the name of the reward function, the message of `error`, and `where` at the end."""
    kind = RewardFailed if isinstance(error, RewardFailed) else RuntimeError
    return kind(f"reward '{name}': {message_of(name, error)}{where}")


def message_of(name: str, error: Exception) -> str:
    """
    Return an error's message without `reward '<name>': ` before it.

    If the message lacks that prefix, put the error's type before it, unless the error is a [`RewardFailed`].
    """
    message, own = str(error), f"reward '{name}': "
    if message.startswith(own) or isinstance(error, RewardFailed):
        return message.removeprefix(own)
    return f"{type(error).__name__}: {message}"


def without_failures(scores: Sequence[float | None]) -> list[float | None]:
    """Return the scores with None in place of NaN."""
    return [None if score is None or math.isnan(score) else score for score in scores]


def _held_by(reward: Any) -> list[Any]:
    """Return the reward functions that a reward holds directly."""
    held = getattr(reward, "__dict__", {})  # `getattr` would ask a proxy, which has every attribute
    members = held.get("members")
    inner = [held.get(name) for name in ("reward", "judge", "function")]
    return [each for each in (*inner, *(members if isinstance(members, (list, tuple)) else ())) if each is not None]


def rewards_within(reward: Any) -> Iterator[Any]:
    """Yield each reward function that a reward holds, at any depth."""
    for each in _held_by(reward):
        yield each
        yield from rewards_within(each)


def runs_in_background(function: Any) -> bool:
    """
    Return whether a reward function spends its time waiting, as for a server or for other processes.

    Async functions count as waiting, and functions with a true attribute `in_background`. [`~trl_ext.PPOTrainer`]
    starts these functions in a thread when generation ends, and asks for their scores after its own forward passes.
    """
    return is_async_callable(function) or bool(getattr(function, "in_background", False))


def distinct(names: Sequence[str]) -> list[str]:
    """
    Make names different, since metrics are kept by name: a name that occurs more than once gets its place in the list.

    >>> distinct(["length", "tone", "length"])
    ['length_0', 'tone', 'length_2']
    """
    numbered = [name if names.count(name) == 1 else f"{name}_{place}" for place, name in enumerate(names)]
    return numbered if len(set(numbered)) == len(numbered) else distinct(numbered)  # `a_0` may be a member's own name


def awaited(scores: Any) -> Any:
    """
    Return what a reward function returned; if the function is async, first await it, even within a running event loop.

    All coroutines of a process run in one event loop, in a thread of its own. A client (such as an HTTP session) that
    an async function keeps from call to call therefore stays usable.
    """
    if not inspect.isawaitable(scores):
        return scores

    async def wait() -> Any:
        try:
            return await scores
        except (SystemExit, KeyboardInterrupt) as error:  # either would end the loop; the caller would wait for ever
            raise RuntimeError(repr(error)) from error

    if threading.current_thread().name == _LOOP:  # an async function calls a reward with an async member
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(lambda: asyncio.run(wait())).result()
    return asyncio.run_coroutine_threadsafe(wait(), _loop(os.getpid())).result()


@cache
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """Return the event loop of a process. A forked process gets a new one, since threads do not survive a fork."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=_LOOP, daemon=True).start()
    return loop


def answers_of(function: Callable, count: int, **kwargs: Any) -> list:
    """
    Call a reward function; return what it gives each completion, with [`FAILED`] for each row that it failed on.

    A [`TellsFailures`] marks failed rows by NaN. Any other function gives a failed row None if it, or a reward that it
    holds, has `on_error="skip"`. We cannot tell this None from "does not apply", so each None that such a function
    returns counts as a failure.
    """
    if isinstance(function, TellsFailures):
        scores = scores_in(function.scores_or_nan(**kwargs), count)
        return [FAILED if score is not None and math.isnan(score) else score for score in scores]
    scores = scores_in(awaited(function(**kwargs)), count)
    if any(getattr(each, "on_error", None) == "skip" for each in (function, *rewards_within(function))):
        return [FAILED if score is None else score for score in scores]
    return scores


def of_rows(columns: dict[str, Any], rows: list[int], count: int) -> dict[str, Any]:
    """Return a reward function's arguments for `rows` alone, taken from its arguments for all `count` rows."""
    return {
        name: [values[row] for row in rows] if isinstance(values, (list, tuple)) and len(values) == count else values
        for name, values in columns.items()
    }


def scores_in(returned: Any, count: int) -> list:
    """Return a reward function's scores as a list; raise a `TypeError` or `ValueError` unless there are `count`."""
    returned = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(returned, (list, tuple)):
        raise TypeError(f"must return a list with one float or None per completion, got {type(returned).__name__}")
    if len(returned) != count:
        raise ValueError(f"returned {len(returned)} rewards for {count} completions; return one for each")
    return list(returned)


def finite_number(reward: Any, row: int | str) -> float:
    """
    Return the reward of completion `row`, a number of Python, NumPy or torch, as a float.

    Raises:
        TypeError: the reward is not a number.
        ValueError: the reward is NaN, infinite or too large for float32.
    """
    try:
        value = None if isinstance(reward, (str, bytes)) else float(reward)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        value = None
    if value is None:
        raise TypeError(f"returned {repr(reward)[:80]} for completion {row}; return a float, or None")
    if not abs(value) <= torch.finfo(torch.float32).max:  # true of NaN, too
        raise ValueError(
            f"returned {value} for completion {row}; return a finite number, or None where the reward does not apply"
        )
    return value


def report_failures(name: str, failed: int, count: int, cause: str, log_metric: Any) -> None:
    """
    Log the share of completions that a reward failed on, and warn when this begins or ends.

    Warn when the reward first fails on a completion, when it begins to fail on all completions of a call (the run may
    then train on nothing), and when it scores again after that.
    """
    log_to(log_metric, {f"rewards/{name}/failed": failed / max(count, 1)})
    before = _failing.get(name)
    if failed and (before is None or failed == count and before == "some"):
        logger.warning(f"reward '{name}' failed on {failed} of {count} completions: {cause}")
    elif before == "all" and failed < count:
        logger.warning(f"reward '{name}' scores again.")
    if failed or before and count:
        _failing[name] = "all" if failed == count else "some"


def log_to(
    log_metric: Callable[[str, float], None] | None, metrics: Mapping[str, float | None], reward: Any = None
) -> None:
    """
    Log the metrics that are not None; with a `reward`, as `rewards/<name of the reward>/…`.

    If `log_metric` is None, as outside TRL, nothing is logged.
    """
    prefix = "" if reward is None else f"rewards/{reward.__name__}/"
    for name, value in metrics.items():
        if value is not None and log_metric is not None:
            log_metric(prefix + name, float(value))
