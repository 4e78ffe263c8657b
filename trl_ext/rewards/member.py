"""Call reward functions from within another reward, handle their failures, and run them in the background."""

import asyncio
import inspect
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from typing import Any, Literal

import regex
from transformers.utils import logging

from ..evaluation.texts import UNSPACED as UNSPACED, words_of as words_of
from ..upstream.names import get_callable_name, is_async_callable
from .scores import log_to, number_or_error, scores_in, without_failures

logger = logging.get_logger(__name__)

OnError = Literal["raise", "skip"]
FAILED = math.nan
_warned: set[tuple[str, bool]] = set()  # a reward's name, and whether it failed on all rows


class RewardFailed(RuntimeError):
    """Raised when a reward function failed; the message says which function and why, so no traceback is needed."""


class TellsFailures:
    """
    Base class of rewards that distinguish rows on which they failed from rows that they do not apply to.

    A subclass defines `scores_or_nan`, which returns NaN for a row on which the reward failed, and None for a row that
    it does not apply to. A call of the reward returns None for both.
    """

    scores_or_nan: Callable[..., list[float | None]]  # as `__call__`, but NaN, not None, for a row that failed

    def __call__(self, prompts: list, completions: list, *args: Any, **kwargs: Any) -> list[float | None]:
        """Return a finite number or None for each completion. The arguments are those of a reward function."""
        return without_failures(self.scores_or_nan(prompts, completions, *args, **kwargs))


class HoldsRewards:
    """
    Base class of rewards that hold other rewards. Such a reward runs in the background if a reward that it holds does.

    The rewards that it holds are found in the attributes `reward`, `members` (a list), `judge` and `function`.
    """

    @property
    def in_background(self) -> bool:
        """
        Return whether any of the rewards that this reward holds runs in the background, see [`runs_in_background`].
        """
        return any(map(runs_in_background, rewards_within(self)))


def rewards_within(reward: Any) -> Iterator[Any]:
    """Yield each reward function that a reward holds, at any depth."""
    held = getattr(reward, "__dict__", {})  # `getattr` would ask a proxy, which has every attribute
    members = held.get("members")
    within = [*map(held.get, ("reward", "judge", "function"))]
    if isinstance(members, list):
        within += members
    for each in within:
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
            outcomes = _answers(self.function, len(completions), kwargs)
        except Exception as error:
            outcomes = [error] * len(completions)
        return settled(self.name, outcomes, self.on_error, log_metric)


def _answers(function: Callable, count: int, kwargs: dict[str, Any]) -> list[Any]:
    """
    Call a reward function with `kwargs`; return one outcome for each of `count` completions: its score, which may be
    None; an error if the score is not a finite number; NaN where the function itself tells that it failed, see
    [`failed_rows`]. An exception that the function raises is not caught.
    """
    scores = scores_in(awaited(telling(function)(**kwargs)), count)
    failed = failed_rows(function, scores)
    return [FAILED if failed[row] else number_or_error(score, f"completion {row}") for row, score in enumerate(scores)]


def telling(function: Callable) -> Callable:
    """Return the function to call for scores: `scores_or_nan` of a [`TellsFailures`], else the reward function."""
    return function.scores_or_nan if isinstance(function, TellsFailures) else function


def failed_rows(function: Callable, scores: Sequence[Any]) -> list[bool]:
    """
    Return for each of the `scores` whether the reward function failed on that row. The scores are those that the
    function from [`telling`] returned.

    A [`TellsFailures`] marks failed rows by NaN. Any other function gives a failed row None if it, or a reward that it
    holds, has `on_error="skip"`. This None looks like "does not apply", so every None that such a function returns
    counts as a failure.
    """
    if isinstance(function, TellsFailures):
        return [score is not None and math.isnan(score) for score in scores]
    skips = "skip" in [getattr(each, "on_error", "") for each in (function, *rewards_within(function))]
    return [skips and score is None for score in scores]


def settled(
    name: str, outcomes: Sequence[Any], on_error: OnError, log_metric: Any, excused: Any = ()
) -> list[float | None]:
    """
    Return a call's outcomes with NaN in place of each error; if `on_error` is `"raise"`, raise the first error.

    Log the share of errors. Warn when a reward first fails, and when it first fails on all completions of a call,
    since the run may then train on nothing.

    Args:
        name: name of the reward.
        outcomes: for each completion its score, or an exception.
        on_error: `"raise"` or `"skip"`.
        log_metric: TRL's function that logs a metric; None logs nothing.
        excused: exception classes that are replaced by NaN, and never raised, whatever `on_error` is.
    """
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    if on_error == "raise" and (mistakes := [error for error in errors if not isinstance(error, excused)]):
        raise failure(name, mistakes[0]) from mistakes[0]
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

    Members with a true `in_background` run in threads, at the same time as the others.

    Args:
        members: the members.
        log_metric, log_extra: TRL's functions that log; None logs nothing.
        **kwargs: what a trainer passes to a reward function: `prompts`, `completions`, the dataset's columns.
    """
    loggers = {"log_metric": log_metric, "log_extra": log_extra}
    started = {m: Started(member.scores_or_nan, **kwargs) for m, member in enumerate(members) if member.in_background}
    here = {m: member.scores_or_nan(**kwargs, **loggers) for m, member in enumerate(members) if m not in started}
    return [here[m] if m in here else started[m].result(**loggers) for m in range(len(members))]


def failure(name: str, error: Exception) -> RuntimeError:
    """
    Return an error with the name of the reward function and the message of `error`: a [`RewardFailed`] if `error` is
    one, else a `RuntimeError`.
    """
    kind = RewardFailed if isinstance(error, RewardFailed) else RuntimeError
    return kind(f"reward '{name}': {failure_message(name, error)}")


def failure_message(name: str, error: Exception) -> str:
    """
    Return an error's message without `reward '<name>': ` before it.

    If the message lacks that prefix, put the error's type before it, unless the error is a [`RewardFailed`].
    """
    message = str(error)
    own = f"reward '{name}': "
    if message.startswith(own) or isinstance(error, RewardFailed):
        return message.removeprefix(own)
    return f"{type(error).__name__}: {message}"


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


_LOOP = "async rewards"  # name of the thread that runs coroutines


def runs_in_background(function: Any) -> bool:
    """
    Return whether a reward function spends its time waiting, as for a server or for other processes.

    This is so for async functions, and for functions with a true attribute `in_background`. [`~trl_ext.PPOTrainer`]
    starts these functions in threads when generation ends, and asks for their scores after its own forward passes.
    """
    return is_async_callable(function) or bool(getattr(function, "in_background", False))


class Started:
    """
    Run a reward function in a new thread, and hold its scores until [`Started.result`] is called.

    Metrics that the function logs are kept until then, and logged in the caller's thread. The function's thread is
    daemonic: it does not keep the program from ending.

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
        """Wait until the function has returned or raised an error."""
        self._scores.exception()

    def result(self, log_metric: Callable | None = None, log_extra: Callable | None = None) -> Any:
        """
        Wait for the function to end; return its result, or raise its error. Its metrics are logged by `log_metric` and
        `log_extra`, TRL's functions that log; None logs nothing.
        """
        try:
            return self._scores.result()
        finally:
            loggers = {"log_metric": log_metric, "log_extra": log_extra}
            for log, args, kwargs in self._logged:
                if (logger := loggers[log]) is not None:
                    logger(*args, **kwargs)


def awaited(scores: Any) -> Any:
    """
    Return what a reward function returned (`scores`); if the function is async, first await it, even within a running
    event loop.

    The coroutines of a process run in one event loop, in a separate thread. A client (such as an HTTP session) that an
    async function keeps from call to call therefore stays usable. Only an async function that another async reward
    calls gets a new event loop for each call, so it must open its client anew.
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


def in_threads(
    function: Callable, jobs: Sequence, threads: int, until: float, is_last: Callable[[Exception], bool]
) -> list[Any]:
    """
    Run `function(job)` for each job in at most `threads` threads; return in order each job's result, or the error it
    raised.

    A job that has not ended at `until`, in seconds of `time.monotonic`, gets a `TimeoutError`. Once `is_last` returns
    True for a job's error, jobs that have not begun also get a `TimeoutError`. Unlike an executor's threads, these are
    daemonic: neither Ctrl-C nor the end of Python waits for them.
    """
    outcomes: list[Any] = [TimeoutError("no answer before the deadline: raise `deadline`")] * len(jobs)
    todo = deque(enumerate(jobs))

    def work() -> None:
        while todo:
            try:
                i, job = todo.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                outcomes[i] = function(job)
            except Exception as error:
                outcomes[i] = error
                if is_last(error):
                    todo.clear()

    workers = [threading.Thread(target=work, daemon=True) for _ in range(min(threads, len(jobs)))]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(max(until - time.monotonic(), 0))
    finally:
        todo.clear()
    return list(outcomes)


def text_of(completion: Any) -> str:
    """
    Return a prompt or completion, a text or messages, as one text; the messages of tools are left out.

    >>> text_of([{"role": "user", "content": "Tea?"}])
    'Tea?'
    >>> text_of([{"role": "tool", "content": "12:00"}, {"role": "assistant", "content": "At noon."}])
    'At noon.'
    """
    if isinstance(completion, str):
        return completion
    contents = (turn.get("content") for turn in completion if turn.get("role") != "tool")
    return "\n".join(str(content) for content in contents if content not in (None, ""))


def recorded(completion: Any) -> str | list[dict[str, Any]]:
    """
    Return a completion in the form that files store: its messages if it has several or a tool call, else its text.
    """
    if isinstance(completion, str) or (len(completion) == 1 and not completion[0].get("tool_calls")):
        return text_of(completion)
    return completion


def well_formed(value: Any) -> Any:
    """
    Replace lone surrogates, which UTF-8 cannot encode, by U+FFFD in a text, or in all texts of a list or mapping.
    """
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {well_formed(key): well_formed(item) for key, item in value.items()}
    return [well_formed(item) for item in value] if isinstance(value, (list, tuple)) else value


class PatternReward:
    r"""
    Score 1.0 for a completion that has every required pattern and no forbidden one, else 0.0.

    Patterns have the syntax of the package `regex`, and are searched for anywhere in the completion's text. To demand
    a format, write one required pattern for the whole completion:
    `(?s)\A<think>.+?</think>\s*<answer>.+?</answer>\s*\Z`

    Args:
        required: regular expressions that must each be found.
        forbidden: regular expressions that must not be found.
        timeout: seconds of processor time that the search for one pattern in one completion may take.
        on_error: what happens if a search takes longer. `"raise"` raises a `RuntimeError`; `"skip"` scores the
            completion None, and the share of completions whose search took longer is logged as
            `rewards/<name>/failed`.
        name: key in the logs; by default `required_pattern`, `forbidden_pattern` or `pattern` (both).

    Examples:
        >>> from trl_ext.rewards import PatternReward
        >>> reward = PatternReward(required=[r"(?s)<think>.+?</think>"], forbidden=[r"(?i)as an AI"])
        >>> reward(prompts=["1 + 1?"] * 2, completions=["<think>Add.</think> 2", "As an AI, I cannot add."])
        [1.0, 0.0]
        >>> prompt, completion = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}
        >>> reward(prompts=[[prompt]], completions=[[completion]])
        [0.0]
    """

    def __init__(
        self,
        required: list[str] | None = None,
        forbidden: list[str] | None = None,
        timeout: float = 1.0,
        on_error: OnError = "raise",
        name: str | None = None,
    ):
        self.required, self.forbidden = (
            [each] if isinstance(each, str) else [*(each or ())] for each in (required, forbidden)
        )
        self.timeout = timeout
        self.on_error = checked_on_error(on_error)
        default = "required_pattern" if required else "forbidden_pattern"
        if required and forbidden:
            default = "pattern"
        self.__name__ = checked_name(name, default)
        self._required = list(map(regex.compile, self.required))
        self._forbidden = list(map(regex.compile, self.forbidden))

    def __call__(
        self, prompts: list, completions: list, completion_ids: Any = None, log_metric: Any = None, **kwargs: Any
    ) -> list[float | None]:
        """
        Return 1.0 or 0.0 for each completion; `on_error` decides what happens if a search takes too long.

        The arguments are those of a reward function; `log_metric`, TRL's function that logs, may be None.
        """
        outcomes = [self._score(row, text_of(completion)) for row, completion in enumerate(completions)]
        return without_failures(settled(self.__name__, outcomes, self.on_error, log_metric))

    def _score(self, row: int, text: str) -> float | TimeoutError:
        def is_found(pattern: Any) -> bool:
            return pattern.search(text, timeout=self.timeout) is not None

        try:
            return float(all(map(is_found, self._required)) and not any(map(is_found, self._forbidden)))
        except TimeoutError:
            return TimeoutError(
                f"a pattern took more than {self.timeout:g} s on completion {row} ({len(text):,} characters): rewrite "
                "it without nested repeats such as `(a+)+`"
            )
