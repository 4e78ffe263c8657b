"""Wrap the trainer's reward functions: check their results and collect their errors."""

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from ..rewards.member import RewardFailed, Started, awaited, finite_number, message_of, runs_in_background, scores_in
from ..rewards.segments import by_token, is_by_token


class Mistakes:
    """
    Collect errors, such as those of reward functions, to raise them on all processes at once.

    An exception on one process alone would leave the others waiting in the next collective.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.notes: list[tuple[str, Exception]] = []

    def raise_everywhere(self, step: int) -> None:
        """
        Raise a `RuntimeError` on every process if any process has noted an error.

        If all noted errors are a `RewardFailed`, which needs no traceback, raise that type instead.
        """
        mine = [
            (f"process {self.accelerator.process_index}: {message}", _kind(error)) for message, error in self.notes
        ]
        everyones = gather_object(mine) if self.accelerator.num_processes > 1 else mine
        if not everyones:
            return
        cause = self.notes[0][1] if self.notes else None
        self.notes.clear()
        kinds = {kind for _, kind in everyones}
        told = list(dict.fromkeys(message for message, _ in everyones))
        told[3:] = [f"and {len(told) - 3} more"] * (len(told) > 3)
        raise (kinds.pop() if len(kinds) == 1 else RuntimeError)(f"At step {step}, {'; '.join(told)}") from cause


def _kind(error: Exception) -> type[RuntimeError]:
    return RewardFailed if isinstance(error, RewardFailed) else RuntimeError


class CheckedReward:
    """
    Wrap a reward function for TRL: await it if it is async, and note its errors instead of raising them.

    If a function scores single tokens, TRL gets the sum of a row's scores. After each call, `token_scores` holds the
    scores of the tokens of each row, or None for a row that was scored as a whole.

    A function that runs in the background can be started early with [`CheckedReward.start`]. TRL's call then waits for
    the result. With a context `around` no function starts early: TRL's call runs it within that context.
    """

    def __init__(
        self,
        function: Callable,
        name: str,
        mistakes: Mistakes,
        around: Callable[[], AbstractContextManager] | None = None,
    ):
        self.function = function
        self.name = name
        self.mistakes = mistakes
        self.around = around or nullcontext
        self.in_background = around is None and runs_in_background(function)
        self.token_scores: list[list[float] | None] = []
        self.is_muted = False  # whether what the function logs is dropped
        self._started: Started | None = None
        self._waiting: AbstractContextManager = nullcontext()

    def start(self, waiting: AbstractContextManager, started: Started | None = None, **kwargs: Any) -> None:
        """
        Start the function in a thread, if it is one that runs in the background.

        Args:
            waiting: a context that is entered while TRL's call waits for the function.
            started: the call of the function for these rows, if it is under way already; None starts it now.
            **kwargs: the arguments of the function.
        """
        if self.in_background:
            self._started, self._waiting = started or Started(self.function, **kwargs), waiting

    def forget(self) -> None:
        """Forget the call that `start` began, so that nothing waits for its result any more."""
        self._started = None

    def __call__(self, prompts: list, completion_ids: list, **kwargs: Any) -> list[float | None]:
        if self.is_muted:
            kwargs |= dict.fromkeys(("log_metric", "log_extra"), lambda *_: None)
        try:
            if self._started is not None:
                with self._waiting:
                    returned = self._started.result(kwargs["log_metric"], kwargs["log_extra"])
            else:
                with self.around():
                    returned = awaited(self.function(prompts=prompts, completion_ids=completion_ids, **kwargs))
            return self._checked(returned, completion_ids)
        except Exception as error:
            self.mistakes.notes.append((f"reward function '{self.name}': {message_of(self.name, error)}", error))
            self.token_scores = [None] * len(prompts)
            return [0.0] * len(prompts)

    def _checked(self, rewards: Any, completion_ids: list) -> list[float | None]:
        scores: list[float | None] = []
        self.token_scores = []
        for row, (reward, ids) in enumerate(zip(scores_in(rewards, len(completion_ids)), completion_ids, strict=True)):
            tokens = None
            if is_by_token(reward):
                given = by_token(reward, row, len(ids))
                tokens = [finite_number(score, f"{row}, token {token}") for token, score in enumerate(given)]
                reward = math.fsum(tokens)
            self.token_scores.append(tokens)
            scores.append(None if reward is None else finite_number(reward, row))
        return scores


def background_last(functions: list[CheckedReward]) -> list[int]:
    """Return the indices of functions in calling order: background functions last, so that they have more time."""
    return sorted(range(len(functions)), key=lambda place: functions[place].in_background)


class AdapterReward:
    """Hold the path of a reward model saved as an adapter, until the policy whose base it may share is loaded."""

    def __init__(self, path: str):
        self.path = path
        self.__name__ = os.path.basename(os.path.normpath(path))

    def __call__(self, *args, **kwargs):
        raise NotImplementedError
