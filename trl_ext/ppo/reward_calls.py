"""Call reward functions for a trainer or for saved rollouts: check their results and collect their errors."""

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor
from transformers import TrainerState

from ..rewards.background import Started, awaited, runs_in_background
from ..rewards.member import RewardFailed, failed_rows, scorer
from ..rewards.scores import by_token, finite_number, is_by_token, scores_in


class DeferredErrors:
    """
    Collect errors, such as those of reward functions, to raise them on all processes at once.

    An exception on one process alone would leave the others waiting in the next collective.
    """

    def __init__(self) -> None:
        self.errors: list[tuple[str, BaseException]] = []
        self.were_raised = False

    def add(self, what: str, error: BaseException) -> None:
        """Record an error until `raise_everywhere`; the phrase `what` says where it was raised."""
        text = str(error) if isinstance(error, RewardFailed) else f"{type(error).__name__}: {error}"
        self.errors.append((f"process {PartialState().process_index}: {what}: {text}", error))

    def raise_everywhere(self, step: int) -> None:
        """
        Raise a `RuntimeError` on every process if any process has recorded an error; the message names the `step`.

        If all recorded errors are a `RewardFailed`, which needs no traceback, raise a `RewardFailed` instead.
        """
        mine = [(message, isinstance(error, RewardFailed)) for message, error in self.errors]
        everyones = gather_object(mine) if PartialState().num_processes > 1 else mine
        if not everyones:
            return
        cause = self.errors[0][1] if self.errors else None
        self.errors.clear()
        self.were_raised = True
        messages = list(dict.fromkeys(message for message, _ in everyones))
        messages[3:] = [f"and {len(messages) - 3} more"] * (len(messages) > 3)
        kind = RewardFailed if all(is_failed for _, is_failed in everyones) else RuntimeError
        raise kind(f"At step {step}, {'; '.join(messages)}") from cause


class CheckedReward:
    """
    Wrap a reward function for TRL: await it if it is async, and record its errors.

    If a function scores single tokens, TRL gets the sum of a row's scores. After each call, `token_scores` holds the
    scores of the tokens of each row, or None for a row without token scores; `failed` tells for each row whether
    the function failed on it and was skipped.

    Before a rollout's call the trainer calls [`CheckedReward.start`], which starts a function that runs in the
    background. TRL's call then waits for the result.

    Args:
        name: the function's, for error messages.
        errors: collects its errors, to raise them on all processes.
        around: makes a context in which TRL's call runs the function. The function is then never started early.
    """

    def __init__(
        self,
        function: Callable,
        name: str,
        errors: DeferredErrors,
        around: Callable[[], AbstractContextManager] | None = None,
    ):
        self.function = function
        self.name = name
        self.errors = errors
        self.around = around or nullcontext
        self.in_background = around is None and runs_in_background(function)
        self.token_scores: list[list[float] | None] = []
        self.failed: list[bool] = []
        self._started: Started | None = None
        self._waiting: AbstractContextManager = nullcontext()

    def start(self, waiting: AbstractContextManager, **kwargs: Any) -> None:
        """
        Clear the last call's results, and start the function in a thread if it is one that runs in the background.

        Args:
            waiting: a context that is entered while TRL's call waits for the function.
        """
        self.token_scores = []
        self.failed = []
        if self.in_background:
            self._started = Started(scorer(self.function), **kwargs)
            self._waiting = waiting

    def drop_started(self) -> None:
        """Drop the call that `start` began, so that its result is not waited for."""
        self._started = None

    def __call__(self, prompts: list, completion_ids: list, **kwargs: Any) -> list[float | None]:
        try:
            if self._started is not None:
                with self._waiting:
                    returned = self._started.result(kwargs["log_metric"], kwargs["log_extra"])
            else:
                with self.around():
                    function = scorer(self.function)
                    returned = awaited(function(prompts=prompts, completion_ids=completion_ids, **kwargs))
            return self._checked(returned, completion_ids)
        except Exception as error:
            self.errors.add(f"reward function '{self.name}'", error)
            self.token_scores = [None] * len(prompts)
            self.failed = [False] * len(prompts)
            return [0.0] * len(prompts)

    def _checked(self, rewards: Any, completion_ids: list) -> list[float | None]:
        """Return one score a row, None for none or a failed one; set `token_scores` and `failed`."""
        scores: list[float | None] = []
        rewards = scores_in(rewards, len(completion_ids))
        self.token_scores = []
        self.failed = failed_rows(self.function, rewards)
        for row, (reward, ids) in enumerate(zip(rewards, completion_ids, strict=True)):
            tokens = None
            if is_by_token(reward):
                given = by_token(reward, row, len(ids))
                tokens = [
                    finite_number(score, f"completion {row}, token {token}") for token, score in enumerate(given)
                ]
                reward = math.fsum(tokens)
            self.token_scores.append(tokens)
            scores.append(None if reward is None or self.failed[row] else finite_number(reward, f"completion {row}"))
        return scores


class AdapterReward:
    """
    Hold the path of a reward model that was saved as an adapter, to load it after the policy, whose base it may share.
    """

    def __init__(self, path: str):
        self.path = path
        self.__name__ = os.path.basename(os.path.normpath(path))

    __call__ = None  # TRL looks for it when it is built; before a rollout the model takes this object's place


def score_rollouts(
    dataset: Dataset, functions: list[Callable], names: list[str], batch_size: int
) -> tuple[Tensor, list[list[list[float] | None]]]:
    """
    Score saved rollouts by reward functions, which are called as PPO calls them. Each process scores a part of the
    rows.

    Args:
        dataset: B rows, as [`with_finished`] returns them, with `prompt` and `completion` (text or messages); the
            functions get the other columns, too.
        functions, names: F reward functions with TRL's signature, and their names.
        batch_size: number of rows in one call of a function.

    Returns:
        Two values for all rows, the same on every process:

        - The (B, F) scores, on the CPU; NaN where a function gives None. If a function failed on a row and was
          skipped, the whole row is NaN.
        - For each function a list with an entry for each row: a list with a score for each token, or None if the
          function scores the row as a whole.

    Raises:
        RuntimeError: a function failed, or returned something that is not a score.
    """
    processes = PartialState()
    errors = DeferredErrors()
    wrapped = [CheckedReward(function, name, errors) for function, name in zip(functions, names, strict=True)]
    size = -(-len(dataset) // processes.num_processes)
    first = processes.process_index * size
    # Equally many calls on each process, as a sharded reward model needs: copies of the first rows fill up the last
    mine = dataset.select([row % len(dataset) for row in range(first, first + size)])
    rows: list[Any] = []
    for batch in mine.iter(batch_size):
        columns = {name: values for name, values in batch.items() if name not in ("prompt", "completion")}
        columns |= {"prompts": batch["prompt"], "completions": batch["completion"], "trainer_state": TrainerState()}
        columns |= dict.fromkeys(("log_metric", "log_extra"), lambda *_: None)
        by_row = list(zip(*(function(**columns) for function in wrapped), strict=True))
        for row, failed in enumerate(zip(*(function.failed for function in wrapped), strict=True)):
            if any(failed):
                by_row[row] = (None,) * len(wrapped)
        rows += zip(by_row, zip(*(function.token_scores for function in wrapped), strict=True), strict=True)
        errors.raise_everywhere(0)
    rows = (gather_object(rows) if processes.num_processes > 1 else rows)[: len(dataset)]
    whole = [[math.nan if score is None else score for score in scores] for scores, _ in rows]
    by_function = [[tokens[f] for _, tokens in rows] for f in range(len(functions))]
    return torch.tensor(whole, dtype=torch.float64), by_function
