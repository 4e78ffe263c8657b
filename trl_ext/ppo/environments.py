"""Call the tools and environments of a rollout: limit the calls' time, reward turns, and collect errors."""

import asyncio
import copy
import functools
import inspect
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

from ..rewards.background import in_daemon
from ..rewards.scores import finite_number
from ..upstream.names import get_callable_name
from .reward_calls import DeferredErrors


class TooSlow(TimeoutError):
    """Raised when a tool or an environment took longer than `tool_timeout`."""


@contextmanager
def _alarm(seconds: float, what: str) -> Iterator[None]:
    """Raise [`TooSlow`] in the main thread, within the `with` block, once these seconds are over."""

    def expired(*_: Any) -> None:
        raise TooSlow(f"{what} took more than {seconds:g} s (`tool_timeout`)")

    before = signal.signal(signal.SIGALRM, expired)
    start = time.monotonic()
    # Repeated each second, since the function may catch the first exception
    left, again = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)
        # An outer alarm goes on: a tool may call `get_reward`, say
        signal.setitimer(signal.ITIMER_REAL, left and max(left - (time.monotonic() - start), 1e-3), again)


def limited(function: Callable, seconds: float | None, what: str, /, *given: Any, **arguments: Any) -> Any:
    """
    Call a function with the arguments `given` and `arguments`, and return its result; raise [`TooSlow`] if it takes
    longer than `seconds` (None: no limit).

    In the main thread a signal interrupts the function, except on Windows. There, and in other threads, the function
    keeps running in the background, and its result is ignored. `what` names the function in the error message.
    """
    if seconds is None:
        return function(*given, **arguments)
    if threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer"):
        with _alarm(seconds, what):
            return function(*given, **arguments)
    future = in_daemon(function, *given, **arguments)
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.done():  # it has just ended, or raised a TimeoutError of its own
            return future.result()
        raise TooSlow(f"{what} took more than {seconds:g} s (`tool_timeout`)") from None


async def limited_async(coroutine: Coroutine, seconds: float | None, what: str, /) -> Any:
    """
    Await a coroutine and return its result; raise [`TooSlow`] if it takes longer than `seconds` (None: no limit).

    The coroutine's own errors are passed on unchanged. `what` names the coroutine in the error message.
    """
    task = asyncio.ensure_future(coroutine)
    done, _ = await asyncio.wait([task], timeout=seconds)
    if not done:
        task.cancel()
        raise TooSlow(f"{what} took more than {seconds:g} s (`tool_timeout`)")
    return task.result()


class ToolCalls:
    """
    Limit the time of a rollout's tool calls, and ask environments to reward them.

    A turn is what the policy samples until it calls tools or ends. `rewards` maps a row's index to a list of pairs:
    the number of a turn, from 0, and the reward of a tool call that this turn made.

    Args:
        timeout: seconds that a call may take; None for no limit.
        errors: collects the errors of environments' `_step_reward`, to be raised on all processes.
    """

    def __init__(self, timeout: float | None, errors: DeferredErrors):
        self.timeout = timeout
        self.errors = errors
        self.turn = -1  # the turn that is being sampled
        self.rewards: dict[int, list[tuple[int, float]]] = defaultdict(list)  # of each row: turn and reward

    def wrap(self, tools: list[dict[str, Callable]], environments: list | None) -> list[dict[str, Callable]]:
        """
        Wrap each row's tools, which are given by name, and return them in the same form.

        Each call is limited in time. After a call, the row's environment is asked for a reward, if it has
        `_step_reward`. `environments` has one environment for each row; None if there are none.
        """
        return [
            {name: self._wrapped(row, tool, environments and environments[row]) for name, tool in of_row.items()}
            for row, of_row in enumerate(tools)
        ]

    def _wrapped(self, row: int, tool: Callable, environment: Any) -> Callable:
        """Return the tool, async if it was, with a limit of time and followed by the environment's reward."""
        what = f"tool {getattr(tool, '__name__', type(tool).__name__)}"

        @functools.wraps(tool)
        def call(**arguments: Any) -> Any:
            with self._rewarding(row, what, environment):
                return limited(tool, self.timeout, what, **arguments)

        @functools.wraps(tool)
        async def call_async(**arguments: Any) -> Any:
            with self._rewarding(row, what, environment):
                return await limited_async(tool(**arguments), self.timeout, what)

        return call_async if inspect.iscoroutinefunction(tool) else call

    @contextmanager
    def _rewarding(self, row: int, what: str, environment: Any) -> Iterator[None]:
        """After the tool call in the `with` block, ask the environment for a reward, if it has `_step_reward`."""
        try:
            yield
        except SystemExit as error:
            raise RuntimeError(f"{what} called exit({error.code!r})") from None
        finally:
            if hasattr(environment, "_step_reward"):
                try:
                    reward = finite_number(limited(environment._step_reward, self.timeout, "it"), f"completion {row}")
                    self.rewards[row].append((self.turn, reward))
                except Exception as error:
                    self.errors.add(f"`{type(environment).__name__}._step_reward`, row {row}", error)

    def token_rewards(self, row: int, tool_mask: list[int]) -> list[float]:
        """
        Return a row's reward at each token: the sum of a turn's rewards at the turn's last token, 0 elsewhere.

        In `tool_mask`, 1 is a token that the policy sampled; a turn is an unbroken run of 1s.
        """
        following = [*tool_mask[1:], 0]
        ends = [t for t, is_sampled in enumerate(tool_mask) if is_sampled and not following[t]]
        rewards = [0.0] * len(tool_mask)
        for turn, reward in self.rewards[row]:
            rewards[ends[min(turn, len(ends) - 1)]] += reward
        return rewards


Pool = dict[str | None, list[Any]]  # TRL's: the instances of each environment, by the environment's name


def states_of(pool: Pool) -> dict[str, list[Any]]:
    """
    Return the states of all environment instances in `pool` that have a `_state_dict`, by the environment's name.
    """
    return {
        str(name): [each._state_dict() for each in environments]
        for name, environments in pool.items()
        if hasattr(environments[0], "_state_dict")
    }


def load_states(pool: Pool, factories: dict[str | None, Callable], states: dict[str, list[Any]]) -> None:
    """Load the states that `states_of` returned into a pool's instances; `factories` make missing instances."""
    for name, environments in pool.items():
        for place, state in enumerate(states.get(str(name), [])):
            if place == len(environments):
                environments.append(factories[name]())
            environments[place]._load_state_dict(state)


class NoEnvironment:
    """Take the place of an environment whose factory failed, until the error is raised on all processes."""

    def reset(self, **row: Any) -> None:
        return None


def guarded(factory: Callable[[], Any], timeout: float | None, errors: DeferredErrors) -> Callable[[], Any]:
    """
    Wrap an environment factory: collect errors of the factory and of `reset`, to raise them later on all processes.

    An error raised at once would end one process and leave the others waiting. `reset` gets a copy of the row. `reset`
    and `get_reward` are limited in time. An instance with `__slots__` keeps its methods, as they cannot be wrapped.

    Args:
        timeout: seconds that `reset` and `get_reward` may take; None for no limit.
    """

    def make() -> Any:
        try:
            environment = factory()
        except Exception as error:
            errors.add(f"environment {get_callable_name(factory)} could not be made", error)
            return NoEnvironment()
        name = type(environment).__name__
        ask = cast(Any, getattr(environment, "get_reward", None))

        def reset(original: Callable, /, *given: Any, **row: Any) -> Any:
            try:
                return limited(original, timeout, f"`{name}.reset`", *given, **copy.deepcopy(row))
            except Exception as error:
                shown = {key: value for key, value in row.items() if key != "prompt"}
                errors.add(f"`{name}.reset` failed for the row {shown!r:.200}", error)

        async def get_reward() -> Any:  # TRL asks whether the method is async
            return await limited_async(ask(), timeout, f"`{name}.get_reward`")

        with suppress(AttributeError):
            if hasattr(environment, "reset"):
                environment.reset = functools.partial(reset, environment.reset)
            if ask is not None:
                is_async = inspect.iscoroutinefunction(ask)
                environment.get_reward = (
                    get_reward if is_async else functools.partial(limited, ask, timeout, f"`{name}.get_reward`")
                )
        return environment

    return make


def step_rewards(collection: Callable[[], Any], kind: type) -> Callable:
    """
    Return a reward function that gives single tokens what `_step_reward` returned, see [`ToolCalls.token_rewards`].

    Args:
        collection: returns the `Collection` of the present rollout.
        kind: a class of environment; rows played in an environment of another class get None.
    """

    def function(environments: list, completion_ids: list[list[int]], **_: Any) -> list[list[float] | None]:
        now = collection()
        masks = now.tool_mask or [[1] * len(ids) for ids in completion_ids]
        return [
            now.calls.token_rewards(row, masks[row]) if type(environment) is kind else None
            for row, environment in enumerate(environments)
        ]

    function.__name__ = f"{kind.__name__}._step_reward"
    return function
