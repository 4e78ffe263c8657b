"""What stands between the trainer and its reward functions."""

import asyncio
import os
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from ..rewards.member import finite_number, scores_in
from ..upstream import is_async_callable


class Mistakes:
    """
    Collect what reward functions do wrong, to raise it on all processes at once.

    An exception on one process alone would leave the others waiting in the next collective.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.notes: list[tuple[str, Exception]] = []

    def raise_everywhere(self, step: int) -> None:
        """Raise a `RuntimeError` on every process if there are notes on any."""
        mine = [f"process {self.accelerator.process_index}: {message}" for message, _ in self.notes]
        everyones = gather_object(mine) if self.accelerator.num_processes > 1 else mine
        if not everyones:
            return
        cause = self.notes[0][1] if self.notes else None
        self.notes.clear()
        raise RuntimeError(f"At step {step}, {'; '.join(everyones)}") from cause


class CheckedReward:
    """A reward function whose mistakes are noted instead of raised."""

    def __init__(self, function: Callable, name: str, mistakes: Mistakes):
        self.function = function
        self.name = name
        self.mistakes = mistakes

    def __call__(self, prompts: list, **kwargs) -> list[float | None]:
        try:
            return self._checked(self.function(prompts=prompts, **kwargs), prompts)
        except Exception as error:
            return self._note(error, prompts)

    def _note(self, error: Exception, prompts: list) -> list[float | None]:
        self.mistakes.notes.append((f"reward function '{self.name}': {type(error).__name__}: {error}", error))
        return [0.0] * len(prompts)

    def _checked(self, rewards: Any, prompts: list) -> list[float | None]:
        rewards = scores_in(rewards, len(prompts))
        return [None if reward is None else finite_number(reward, row) for row, reward in enumerate(rewards)]


class CheckedAsyncReward(CheckedReward):
    async def __call__(self, prompts: list, **kwargs) -> list[float | None]:  # type: ignore[override]
        try:
            return self._checked(await self.function(prompts=prompts, **kwargs), prompts)
        except (Exception, asyncio.CancelledError) as error:
            return self._note(error if isinstance(error, Exception) else RuntimeError("cancelled"), prompts)


def checked(function: Callable, name: str, mistakes: Mistakes) -> CheckedReward:
    """Wrap a reward function so that its mistakes are noted."""
    return (CheckedAsyncReward if is_async_callable(function) else CheckedReward)(function, name, mistakes)


class AdapterReward:
    """Stand for a reward model that was saved as an adapter, until the policy is there whose base it may share."""

    def __init__(self, path: str):
        self.path = path
        self.__name__ = os.path.basename(os.path.normpath(path))

    def __call__(self, *args, **kwargs):
        raise NotImplementedError
