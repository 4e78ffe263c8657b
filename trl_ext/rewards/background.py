"""Run what waits for something else: async reward functions in one event loop, others in threads."""

import asyncio
import inspect
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from typing import Any

from ..upstream.names import is_async_callable

_LOOP = "async rewards"  # name of the thread that runs coroutines


def rewards_within(reward: Any) -> Iterator[Any]:
    """Yield each reward that a reward calls, at any depth. A reward's method `held` returns those that it calls."""
    if held := getattr(type(reward), "held", None):  # of the class: a proxy object has every attribute
        for inner in held(reward):
            yield inner
            yield from rewards_within(inner)


def runs_in_background(function: Any) -> bool:
    """
    Return whether a reward function spends its time waiting, as for a server or for other processes.

    This is so for async functions, for functions with a true attribute `in_background`, and for those that call one of
    these, see [`rewards_within`]. [`~trl_ext.PPOTrainer`] starts these functions in threads when generation ends, and
    asks for their scores after its own forward passes.
    """
    return any(
        is_async_callable(each) or getattr(each, "in_background", False)
        for each in (function, *rewards_within(function))
    )


def in_daemon(function: Callable, *args: Any, **kwargs: Any) -> Future:
    """Call a function in a new thread, which does not keep Python from ending; return the future of its result."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:  # else who waits for the result would wait for ever
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


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
        notes = {log: partial(self._note, log) for log in ("log_metric", "log_extra")}
        self._scores = in_daemon(lambda: awaited(function(**kwargs, **notes)))

    def _note(self, log: str, *args: Any, **kwargs: Any) -> None:
        self._logged.append((log, args, kwargs))

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
