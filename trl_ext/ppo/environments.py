"""Call the tools and environments of a rollout: limit and record the calls, reward turns, and note errors."""

import asyncio
import copy
import functools
import inspect
import pickle
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from ..rewards.member import finite_number
from ..runs.sources import source_identity
from ..upstream.names import get_callable_name
from .rewards import Mistakes


class TooSlow(TimeoutError):
    """Say that a tool or an environment took longer than `tool_timeout`."""


@contextmanager
def _alarm(seconds: float, what: str) -> Iterator[None]:
    def expired(*_: Any) -> None:
        raise TooSlow(f"{what} took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, expired)
    # Repeated each second, since the function may catch the first exception
    left, again = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    start = time.monotonic()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:  # an outer alarm: a tool may call `get_reward`, say
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - start), 1e-3), again)


def limited(function: Callable, seconds: float | None, what: str, /, *given: Any, **arguments: Any) -> Any:
    """
    Call a function, and raise [`TooSlow`] if it has not returned after `seconds`.

    In the main thread a signal interrupts the function. In any other thread the function goes on in the background,
    and its result is dropped. The error message calls the function `what`.
    """
    if seconds is None:
        return function(*given, **arguments)
    if threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer"):
        with _alarm(seconds, what):
            return function(*given, **arguments)
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(function, *given, **arguments).result(seconds)
    except TimeoutError:
        raise TooSlow(f"{what} took more than {seconds:g} s") from None
    finally:
        pool.shutdown(wait=False)


async def limited_async(coroutine: Coroutine, seconds: float | None, what: str, /) -> Any:
    """Await a coroutine; raise [`TooSlow`] after `seconds`. The coroutine's own errors are passed on unchanged."""
    task = asyncio.ensure_future(coroutine)
    done, _ = await asyncio.wait([task], timeout=seconds)
    if not done:
        task.cancel()
        raise TooSlow(f"{what} took more than {seconds:g} s")
    return task.result()


@dataclass
class Call:
    """Record one tool call."""

    turn: int  # of the row, from 0
    name: str
    arguments: dict[str, Any]
    failed: bool


@dataclass
class Calls:
    """
    Record the tool calls of one rollout, by row.

    Args:
        timeout: seconds that a call may take; None for no limit.
        mistakes: collects the errors of environments' `_step_reward`.
    """

    timeout: float | None
    mistakes: Mistakes
    turn: int = -1  # the turn that is being drawn
    made: dict[int, list[Call]] = field(default_factory=dict)
    rewards: dict[int, list[tuple[int, float]]] = field(default_factory=dict)  # of each row: turn and reward

    def watch(self, tools: list[dict[str, Callable]], environments: list | None) -> list[dict[str, Callable]]:
        """Wrap each row's tools: a call is recorded, limited in time, and rewarded by the row's environment."""
        return [
            {name: self._watched(row, tool, environments and environments[row]) for name, tool in of_row.items()}
            for row, of_row in enumerate(tools)
        ]

    def _watched(self, row: int, tool: Callable, environment: Any) -> Callable:
        name = getattr(tool, "__name__", type(tool).__name__)

        @functools.wraps(tool)
        def call(**arguments: Any) -> Any:
            with self._noting(row, name, arguments, environment):
                return limited(tool, self.timeout, f"tool {name}", **arguments)

        @functools.wraps(tool)
        async def call_async(**arguments: Any) -> Any:
            with self._noting(row, name, arguments, environment):
                return await limited_async(tool(**arguments), self.timeout, f"tool {name}")

        return call_async if inspect.iscoroutinefunction(tool) else call

    @contextmanager
    def _noting(self, row: int, name: str, arguments: dict[str, Any], environment: Any) -> Iterator[None]:
        call = Call(self.turn, name, copy.deepcopy(arguments), failed=True)
        self.made.setdefault(row, []).append(call)
        try:
            yield
            call.failed = False
        except SystemExit as error:
            raise RuntimeError(f"tool {name} called exit({error.code!r})") from None
        finally:
            self._reward(row, environment)

    def _reward(self, row: int, environment: Any) -> None:
        """Record the environment's reward for the call that has just ended, if the environment has `_step_reward`."""
        ask = getattr(environment, "_step_reward", None)
        if ask is None:
            return
        try:
            reward = finite_number(limited(ask, self.timeout, "it"), row)
        except Exception as error:
            self.mistakes.notes.append((f"`{type(environment).__name__}._step_reward`, row {row}: {error}", error))
            return
        self.rewards.setdefault(row, []).append((self.turn, reward))

    def token_rewards(self, row: int, tool_mask: list[int]) -> list[float]:
        """Return a number for each token of a row: the sum of a turn's rewards at its last token, 0 elsewhere."""
        ends = [t for t, drawn in enumerate(tool_mask) if drawn and not (tool_mask[t + 1 : t + 2] or [0])[0]]
        rewards = [0.0] * len(tool_mask)
        for turn, reward in self.rewards.get(row, []):
            rewards[ends[min(turn, len(ends) - 1)]] += reward
        return rewards


Pool = dict[str | None, list[Any]]  # TRL's: the instances of each environment, by the environment's name


def identities_of(tools: list[Callable], pool: Pool) -> dict[str, str]:
    """Return a hash of each tool's and environment's source; a resumed run compares hashes to notice changed code."""
    facts = {f"tool {get_callable_name(tool)}": source_identity(tool) for tool in tools}
    names = {name: type(each[0]) for name, each in pool.items()}
    return facts | {f"environment {name or kind.__name__}": source_identity(kind) for name, kind in names.items()}


def states_of(pool: Pool) -> dict[str, list[Any]]:
    """Return the states of all instances of each environment that has a `_state_dict`, by the environment's name."""
    return {
        str(name): [each._state_dict() for each in environments]
        for name, environments in pool.items()
        if hasattr(environments[0], "_state_dict")
    }


def load_states(pool: Pool, factories: dict[str | None, Callable], states: dict[str, list[Any]]) -> None:
    """Load the states that `states_of` returned into a pool; if it has fewer instances than states, make more."""
    for name, environments in pool.items():
        for place, state in enumerate(states.get(str(name), [])):
            if place == len(environments):
                environments.append(factories[name]())
            environments[place]._load_state_dict(state)


def what_reset_leaves(
    played: Any, fresh: Any, row: dict[str, Any], same_draws: Callable[[], AbstractContextManager]
) -> list[str]:
    """
    Return the names of attributes that differ between a used and a new environment after `reset` on the same row.

    "what it says" is among them if `reset` returns different texts. If nothing differs, the environment needs no
    `_state_dict`: a resumed run is the same without it.

    Args:
        played: an environment after an episode.
        fresh: an environment of the same class that has not been used.
        row: a row of the dataset.
        same_draws: a context that gives the global random generators the same seed each time.
    """
    seen: list[dict[str, bytes]] = []
    for environment in (played, fresh):
        with same_draws():
            observation = environment.reset(**row)
        slots = (name for kind in type(environment).__mro__ for name in vars(kind).get("__slots__", ()))
        attributes = {name: getattr(environment, name) for name in slots if hasattr(environment, name)}
        attributes |= getattr(environment, "__dict__", {})
        seen.append({"what it says": repr(observation).encode(), **_pickled(attributes)})
    return [name for name in seen[0] if seen[0][name] != seen[1].get(name)]


def _pickled(attributes: dict[str, Any]) -> dict[str, bytes]:
    result = {}
    for name, value in attributes.items():
        if name in ("reset", "get_reward"):  # ours, see `guarded`
            continue
        with suppress(Exception):  # what cannot be pickled, such as a socket, is not compared
            result[f"`{name}`"] = pickle.dumps(value)
    return result


class NoEnvironment:
    """Stand in for an environment that could not be made, until the rollout raises the error on all processes."""

    def reset(self, **row: Any) -> None:
        return None


def guarded(
    factory: Callable[[], Any], timeout: Callable[[], float | None], mistakes: Callable[[], Mistakes | None]
) -> Callable[[], Any]:
    """
    Wrap an environment factory: note errors of the factory and of `reset`, which are raised later on all processes.

    An error raised at once would end one process and leave the others waiting. `reset` gets a copy of the row.
    `reset` and `get_reward` are limited in time.

    Args:
        factory: a class, or a function without arguments.
        timeout: returns the seconds that `reset` and `get_reward` may take; None for no limit.
        mistakes: returns the object that collects errors. While the trainer is built it returns None; errors are then
            raised at once.
    """

    def make() -> Any:
        name = getattr(factory, "__name__", type(factory).__name__)
        try:
            environment = factory()
        except Exception as error:
            return fail(f"environment {name} could not be made: {type(error).__name__}: {error}", error)
        name = type(environment).__name__
        if public := {"state_dict", "load_state_dict"} & {*dir(type(environment))}:
            raise ValueError(
                f"`{name}.{min(public)}` would become a tool, because every public method is one. Rename it to "
                f"`_{min(public)}`."
            )
        if callable(getattr(environment, "reset", None)):
            replace(environment, "reset", functools.partial(reset, environment.reset, name))
        if callable(getattr(environment, "get_reward", None)):
            ask = environment.get_reward
            what = f"`{name}.get_reward`"

            async def get_reward() -> Any:  # TRL asks whether the method is async
                return await limited_async(ask(), timeout(), what)

            is_async = inspect.iscoroutinefunction(ask)
            replace(environment, "get_reward", get_reward if is_async else lambda: limited(ask, timeout(), what))
        return environment

    def replace(environment: Any, name: str, method: Callable) -> None:
        with suppress(AttributeError):  # a class with `__slots__` keeps its own method, without limit and notes
            setattr(environment, name, method)

    def reset(original: Callable, name: str, /, *given: Any, **row: Any) -> Any:
        try:
            observation = limited(original, timeout(), f"`{name}.reset`", *given, **copy.deepcopy(row))
            if not (observation is None or isinstance(observation, (str, list))):
                raise TypeError(
                    f"it must return text, a list of content blocks or None, got {type(observation).__name__}"
                )
            return observation
        except Exception as error:
            shown = {key: value for key, value in row.items() if key != "prompt"}
            return fail(f"`{name}.reset` failed for the row {shown!r:.200}: {type(error).__name__}: {error}", error)

    def fail(message: str, error: Exception) -> Any:
        noted = mistakes()
        if noted is None:
            raise ValueError(f"{message}.") from error
        noted.notes.append((message, error))
        return None if message.startswith("`") else NoEnvironment()

    return make


def step_rewards(collection: Callable[[], Any], kind: type) -> Callable:
    """
    Return a reward function that gives the rewards of `_step_reward`, each at the last token of its turn.

    Args:
        collection: returns the rollout that is being collected.
        kind: a class of environments; rows played in environments of another class get None.
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


def check_names(dataset: Any, name: str, known: list[str]) -> None:
    """Raise if a dataset row names no environment or an unknown one, which TRL would notice only in the rollout."""
    if "environment" not in dataset.column_names:
        raise ValueError(
            f"The {name} dataset has no column `environment`. Add one that holds one of {known} in each row."
        )
    if unknown := sorted({str(each) for each in dataset.unique("environment")} - {*known}):
        raise ValueError(
            f"The {name} dataset names the environments {unknown}, but `environment_factory` has only {known}. Add "
            "them there, or remove these rows."
        )


def check_agents(args: Any, tools: Any, environment_factory: Any, rollout_func: Any, datasets: list) -> None:
    """Raise if `tools`, `environment_factory` or `rollout_func` cannot work with the settings and datasets."""
    given = {"tools": tools, "environment_factory": environment_factory, "rollout_func": rollout_func}
    named = [name for name, value in given.items() if value]
    if not named:
        return
    if args.rollouts_ahead:
        raise ValueError(
            f"`rollouts_ahead={args.rollouts_ahead}` generates whole rollouts in advance, and `{named[0]}` does not "
            "allow that. Set `rollouts_ahead=0`."
        )
    if args.reward_normalization == "reference" and environment_factory is not None:
        raise ValueError(
            "`reward_normalization='reference'` scores demonstrations, and demonstrations have no environment. Set "
            "another `reward_normalization`."
        )
    for name, dataset in datasets:
        if dataset is None:
            continue
        if "input_ids" in dataset.column_names:
            raise ValueError(
                f"The {name} dataset has `input_ids`, which the policy reads unchanged, but `{named[0]}` adds to the "
                "prompt. Give messages in `prompt` instead."
            )
        if isinstance(environment_factory, dict):
            check_names(dataset, name, list(environment_factory))
        has_prompts = "prompt" in dataset.column_names and len(dataset) > 0
        if has_prompts and rollout_func is None and not isinstance(dataset[0]["prompt"], list):
            raise ValueError(
                f"`{named[0]}` needs messages as prompts, but the prompts of the {name} dataset are text. Give "
                f"`[{{'role': 'user', 'content': …}}]`."
            )
