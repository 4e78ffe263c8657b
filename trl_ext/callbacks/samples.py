"""Keep a few completions of each rollout, with their scores."""

import math
from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback

from ..rewards.watches.watch import Watch
from .generation import generate_answers, ids_of
from .metrics import rollout_steps

MAX_NEW_TOKENS = 128  # of an answer in AnswersCallback


@dataclass(eq=False, kw_only=True)
class SamplesCallback(TrainerCallback):
    """
    Append the first completions of each rollout, with every reward function's score, to `completions.rank0.jsonl`.

    A completion is written as text or, if tools were called, as the messages of all its turns.

    >>> trainer.add_callback(SamplesCallback(trainer=trainer, per_rollout=4))

    Args:
        trainer: a [`PPOTrainer`] or `trl.RLOOTrainer`, whose table of completions is read.
        per_rollout: number of completions to keep of each rollout, over all processes. A thousand rollouts with 8
            completions of 1 kB each take 8 MB.
        folder: folder of the file. The default is the folder of [`JSONLCallback`].
    """

    trainer: Any
    per_rollout: int = 8
    folder: str | None = None

    def __post_init__(self) -> None:
        if not hasattr(self.trainer, "_logs"):
            raise ValueError(
                "`SamplesCallback` reads rollouts, which PPOTrainer and RLOOTrainer keep, but "
                f"{type(self.trainer).__name__} keeps none: use a watch of `trl_ext.rewards` there"
            )
        if self.per_rollout < 1:
            raise ValueError(f"`per_rollout` must be 1 or more, got {self.per_rollout}")
        self._watch = Watch(self.folder)

    def on_step_end(self, args, state, control, **kwargs):
        # After the first step of a rollout the table holds its answers; after an evaluation, the evaluation's answers
        if not state.is_world_process_zero or (state.global_step - 1) % rollout_steps(args):
            return
        table, size = self.trainer._logs, args.generation_batch_size
        prompts, completions = ([*table[name]][-size:][: self.per_rollout] for name in ("prompt", "completion"))
        scores = {name: [*values][-size:][: self.per_rollout] for name, values in table["rewards"].items()}
        rows = [
            {name: None if math.isnan(values[i]) else values[i] for name, values in scores.items()}
            for i in range(len(prompts))
        ]
        self._watch.write_rows(prompts, completions, rows, state.global_step - 1)


@dataclass(eq=False, kw_only=True)
class AnswersCallback(TrainerCallback):
    """
    Have the model answer a few prompts before training, at each evaluation and at the end.

    Use it for SFT and DPO, which generate no answers of their own. The answers are greedy, have at most 128 tokens,
    and are appended to `completions.rank0.jsonl`. All processes generate.

    >>> trainer.add_callback(AnswersCallback(trainer=trainer, prompts=["The sky is", "Two and two are"]))

    Args:
        trainer: any Trainer of a causal language model.
        prompts: texts or messages.
        folder: folder of the file. The default is the folder of [`JSONLCallback`].

    Raises:
        ValueError: the longest prompt leaves no token for an answer.
    """

    trainer: Any
    prompts: list[Any]
    folder: str | None = None

    def __post_init__(self) -> None:
        ids_of(self.trainer, self.prompts)  # refuses a prompt that leaves no room
        self._watch, self._step = Watch(self.folder), -1

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:  # else the run goes on from a checkpoint
            self._answer(state)

    def on_evaluate(self, args, state, control, **kwargs):
        self._answer(state)

    def on_train_end(self, args, state, control, **kwargs):
        self._answer(state)

    def _answer(self, state: Any) -> None:
        if self._step == state.global_step:
            return
        self._step = state.global_step
        given = generate_answers(self.trainer, self.prompts, MAX_NEW_TOKENS)
        if state.is_world_process_zero:
            nothing: list[dict[str, Any]] = [{} for _ in self.prompts]
            self._watch.write_rows(self.prompts, given["completions"], nothing, state.global_step)
