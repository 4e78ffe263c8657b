"""How a reward function within another one is called, what it may return, and what happens when it fails."""

import asyncio
import inspect
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from typing import Any, Literal

import torch
from transformers.utils import logging

from ..runs.jsonl import is_finite_number
from ..upstream.names import get_callable_name, is_async_callable
from .segments import is_by_token

logger = logging.get_logger(__name__)

OnError = Literal["raise", "skip"] | float
FAILED = float("nan")  # told apart from a NaN that a function returns by being this one object
_failing: dict[str, str] = {}  # reward → "some" or "all", as it was last said to fail
_LOOP = "async rewards"  # name of the thread that runs coroutines


class RewardFailed(RuntimeError):
    """
    A reward function failed and says why itself, as where a server does not answer: no traceback tells more.

    Args:
        message: which reward it is, and why.
    """

    def __init__(self, message: str):
        super().__init__(message)


class Member:
    """
    A reward function within another: any with TRL's signature, async or not.

    What it does wrong is an exception, another number of scores than completions, or a score that is no finite number.
    A wrong score is that of one row; everything else is that of all rows of the call.

    Args:
        function: with TRL's signature.
        on_error: `"raise"` raises a `RuntimeError` that names function and completion; `"skip"` scores None, and
            a reward that holds the function then gives no more for the row than if it had answered; a number is the
            score instead. Without `"raise"` the share of such rows is logged as `rewards/<name>/failed`.
    """

    def __init__(self, function: Callable, on_error: OnError = "raise"):
        if not callable(function) or isinstance(function, type):
            raise TypeError(f"a member must be a reward function, got {function!r}")
        self.function = function
        self.on_error = check_on_error(on_error)

    @property
    def name(self) -> str:
        """The function's name."""
        return get_callable_name(self.function)

    @property
    def in_background(self) -> bool:
        """Whether its time goes by elsewhere, see [`runs_in_background`]."""
        return runs_in_background(self.function)

    def __call__(self, prompts: list, completions: list, **kwargs: Any) -> list[float | None]:
        """Return a finite number or None for each completion."""
        return without_failures(self.told(prompts, completions, **kwargs))

    def told(self, prompts: list, completions: list, log_metric: Any = None, **kwargs: Any) -> list[float | None]:
        """
        Return the same, but NaN for a row that was skipped, so that None is where the function does not apply.

        See [`answers_of`] for how a function says so itself.
        """
        kwargs = {"prompts": prompts, "completions": completions, "log_metric": log_metric, **kwargs}
        failed: list[int] = []
        scores: list[float | None] = []
        cause = ""
        try:
            returned = answers_of(self.function, len(completions), **kwargs)
        except Exception as error:
            if self.on_error == "raise":
                raise failure(self.name, error) from error
            returned, failed = [None] * len(completions), list(range(len(completions)))
            cause = said_of(self.name, error)
        for row, score in enumerate(returned):
            try:
                if is_by_token(score):
                    raise TypeError(
                        f"scored each token of completion {row}, but within another reward only whole completions are "
                        "scored: give this function to the trainer by itself"
                    )
                scores.append(score if score is None or score is FAILED else finite_number(score, row))
            except (TypeError, ValueError) as error:
                if self.on_error == "raise":
                    raise RuntimeError(f"reward '{self.name}': {error}") from error
                scores.append(None)
                failed.append(row)
                cause = cause or str(error)
        if self.on_error != "raise":
            report_failures(self.name, len(failed), len(scores), cause, log_metric)
            for row in failed:
                scores[row] = FAILED if self.on_error == "skip" else float(self.on_error)
        return scores


class Started:
    """
    A call of a reward function that runs in a thread of its own, until its scores are asked for.

    What the function logs is handed on then, in the caller's thread. The thread ends with the program: it keeps nobody
    from leaving.

    Args:
        function: with TRL's signature, async or not.
        **kwargs: of the call, without `log_metric` and `log_extra`.
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
        except BaseException as error:  # whoever asks for the scores would wait for ever
            self._scores.set_exception(error)

    def wait(self) -> None:
        """Wait until the function has returned, or failed."""
        self._scores.exception()

    def result(self, log_metric: Callable | None = None, log_extra: Callable | None = None) -> Any:
        """Wait for the function; return what it returned, or raise what it raised."""
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
    Return what each member says, NaN where it failed and is skipped, see [`Member.told`].

    Those in the background run at the same time, in threads, while others score.
    """
    loggers = {"log_metric": log_metric, "log_extra": log_extra}
    started = {m: Started(member.told, **kwargs) for m, member in enumerate(members) if member.in_background}
    here = {m: member.told(**kwargs, **loggers) for m, member in enumerate(members) if m not in started}
    return [here[m] if m in here else started[m].result(**loggers) for m in range(len(members))]


def failure(name: str, error: Exception, where: str = "") -> RuntimeError:
    """Return the error of a reward function, with its name before it and `where` behind it."""
    kind = RewardFailed if isinstance(error, RewardFailed) else RuntimeError
    return kind(f"reward '{name}': {said_of(name, error)}{where}")


def said_of(name: str, error: Exception) -> str:
    """Return an error as a text, with its type unless it tells all, and without `name` where it begins with that."""
    said, own = str(error), f"reward '{name}': "
    if said.startswith(own) or isinstance(error, RewardFailed):
        return said.removeprefix(own)
    return f"{type(error).__name__}: {said}"


def without_failures(scores: Sequence[float | None]) -> list[float | None]:
    """Return None for a row that failed, as for one that the function does not apply to."""
    return [None if score is None or math.isnan(score) else score for score in scores]


def check_on_error(on_error: Any) -> OnError:
    """Return `on_error` if it is a policy of [`Member`]; raise a `ValueError` if not."""
    if not (on_error in ("raise", "skip") or is_finite_number(on_error)):
        raise ValueError(f"`on_error` must be 'raise', 'skip' or a finite number, got {on_error!r}")
    return on_error


def policies_within(reward: Any) -> Iterator[Any]:
    """Yield `on_error` of all functions within a reward function."""
    held = getattr(reward, "__dict__", {})  # `getattr` would ask a proxy, which has every attribute
    members = held.get("members")
    inner = [held.get(name) for name in ("reward", "judge", "function")]
    for each in (f for f in (*inner, *(members if isinstance(members, (list, tuple)) else ())) if f is not None):
        if isinstance(policy := getattr(each, "on_error", "raise"), (str, int, float)):
            yield policy
        yield from policies_within(each)


def runs_in_background(function: Any) -> bool:
    """
    Return whether a function's time goes by elsewhere: on a server, in other processes.

    It says so by an attribute `in_background`, and async functions do. [`~trl_ext.PPOTrainer`] starts such functions
    when generation ends, in a thread, and awaits them after its own passes.
    """
    return is_async_callable(function) or bool(getattr(function, "in_background", False))


def distinct(names: Sequence[str]) -> list[str]:
    """Return the names, those that occur more than once with their place behind them: metrics are kept by name."""
    told = [name if names.count(name) == 1 else f"{name}_{place}" for place, name in enumerate(names)]
    return told if len(set(told)) == len(told) else distinct(told)  # one may be called as another one is now


def awaited(scores: Any) -> Any:
    """
    Return what a function returned, and of an async one what it will, also where an event loop is running.

    Coroutines run in one event loop of the process, in a thread: a client that a function keeps stays usable.
    """
    if not inspect.isawaitable(scores):
        return scores

    async def wait() -> Any:
        try:
            return await scores
        except (SystemExit, KeyboardInterrupt) as error:  # it would end the loop, and whoever waits would wait on
            raise RuntimeError(repr(error)) from error

    if threading.current_thread().name == _LOOP:  # of an async function that calls a reward with an async member
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(lambda: asyncio.run(wait())).result()
    return asyncio.run_coroutine_threadsafe(wait(), _loop(os.getpid())).result()


@cache
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """Return the event loop of a process: a fork inherits none that runs."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=_LOOP, daemon=True).start()
    return loop


def answers_of(function: Callable, count: int, **kwargs: Any) -> list:
    """
    Call a reward function; return one answer a completion, [`FAILED`] where it says that it failed.

    It says so by NaN if it has a method `told`, which is called then. Without one, None stands for a failure if its
    `on_error`, or that of a part, is `"skip"`: nobody could tell it from "does not apply".
    """
    if hasattr(type(function), "told"):
        told = scores_in(awaited(function.told(**kwargs)), count)  # type: ignore[attr-defined]
        return [FAILED if isinstance(answer, float) and math.isnan(answer) else answer for answer in told]
    returned = scores_in(awaited(function(**kwargs)), count)
    if "skip" in (getattr(function, "on_error", "raise"), *policies_within(function)):
        return [FAILED if answer is None else answer for answer in returned]
    return returned


def scores_in(returned: Any, count: int) -> list:
    """Return what a reward function returned as a list; raise if it does not hold one score a completion."""
    returned = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(returned, (list, tuple)):
        raise TypeError(f"must return a list with one float or None per completion, got {type(returned).__name__}")
    if len(returned) != count:
        raise ValueError(f"returned {len(returned)} rewards for {count} completions; return one for each")
    return list(returned)


def finite_number(reward: Any, row: int | str) -> float:
    """Return the reward of completion `row` as a finite float: a number of Python, NumPy or torch."""
    try:
        value = None if isinstance(reward, (str, bytes)) else float(reward)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        value = None
    if value is None:
        raise TypeError(f"returned {repr(reward)[:80]} for completion {row}; return a float, or None")
    if not abs(value) <= torch.finfo(torch.float32).max:  # NaN, too
        raise ValueError(f"returned {value} for completion {row}; return None where it does not apply")
    return value


def report_failures(name: str, failed: int, count: int, cause: str, log_metric: Any) -> None:
    """
    Log the share of completions that a reward failed on, and warn: once if it fails on some, and whenever it begins to
    fail on all, or ends that. A run whose rewards are all skipped trains on nothing.
    """
    log_to(log_metric, {f"rewards/{name}/failed": failed / max(count, 1)})
    before = _failing.get(name)
    if failed and (before is None or failed == count and before == "some"):
        logger.warning(f"reward '{name}' failed on {failed} of {count} completions: {cause}")
    elif before == "all" and failed < count:
        logger.warning(f"reward '{name}' scores again.")
    if failed or before and count:
        _failing[name] = "all" if failed == count else "some"


def log_to(log_metric: Callable[[str, float], None] | None, metrics: dict[str, float | None]) -> None:
    """Log the metrics that are not None. Outside TRL `log_metric` is None, and nothing is logged."""
    for name, value in metrics.items():
        if value is not None and log_metric is not None:
            log_metric(name, float(value))
