"""Let a vLLM server generate the next rollout, and start scoring it, while the trainer trains on the one before."""

import copy
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.utils import logging

from ..rewards.member import Started, awaited
from ..upstream.names import is_conversational
from ..upstream.temporarily import temporarily
from .inputs import with_prompts
from .rollout import given_to_rewards, with_answers
from .vllm import sampled_logprobs

logger = logging.get_logger(__name__)


class Answers(NamedTuple):
    """What was drawn for the prompts of a rollout: token ids, and their (B, T) log-probs."""

    ids: list[list[int]]
    logprobs: Tensor


@dataclass
class Flight:
    """Hold a rollout that is being generated ahead of time."""

    number: int  # of the rollout, from 0
    version: int  # on how many rollouts the weights that generate this one have been trained
    rows: list[dict[str, Any]]  # dataset rows of this process
    prompts: list[list[int]]  # token ids
    answers: Future[Answers] = field(default_factory=Future)
    output: Future | None = None  # on the first process: the server's answer
    started: dict[int, Started] = field(default_factory=dict)  # calls of reward functions, by the function's index


class RolloutsAhead:
    """
    Generate one rollout ahead: rollout n is generated with the weights after training on rollout n − 2.

    The prompts of a rollout depend only on the seed and the rollout's number, so they are known before the Trainer
    delivers them. `take` checks that the Trainer delivers the same prompts. See docs/vllm.md.

    TRL's `generate` has collectives, so all processes must call it at the same time. We call it twice. The first call
    starts a thread that sends the request, and returns empty answers. The second call, once the answers have arrived,
    returns them.

    Args:
        trainer: the trainer that trains on the rollouts.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.pending: dict[int, Flight] = {}
        self._tokenizer = copy.deepcopy(trainer.processing_class)  # read in another thread
        self._functions = list(trainer.reward_funcs)  # the trainer reorders its own list while it scores
        self._last: dict[int, Started] = {}  # the latest call of each reward function, by index
        self._starting = threading.Lock()
        self._taken: Flight | None = None
        self._order: tuple[int, list[int]] | None = None  # an epoch, and its rows of the dataset

    def take(self, prompt_ids: list[list[int]]) -> Flight:
        """
        Start the rollouts that the current weights have to generate, then wait for the current rollout and return it.

        Args:
            prompt_ids: the prompts that the Trainer delivers. If the rollout was drawn for other prompts, all
                processes raise a `RuntimeError`.
        """
        trainer = self.trainer
        number = trainer._step // trainer._steps_per_rollout
        micro_batches = trainer.state.max_steps * trainer.args.gradient_accumulation_steps
        after_last = math.ceil(micro_batches / trainer._steps_per_rollout)
        last = min(number + trainer.args.rollouts_ahead, after_last - 1)
        if new := [self._prepare(m, number) for m in range(number, last + 1) if m not in self.pending]:
            self.settle()  # no weights may change under a generation
            with trainer.metrics.timed("sync_weights"):
                trainer.vllm_generation.sync_weights()
                trainer._last_loaded_step = trainer.state.global_step
            for rollout in new:
                self.pending[rollout.number] = rollout
                self._submit(rollout)
        rollout = self.pending[number]
        self._wait_for([rollout])
        del self.pending[number]
        if rollout.prompts != prompt_ids:
            error = RuntimeError(
                f"rollout {number} was generated for other prompts than the training dataloader now returns: with "
                "`rollouts_ahead`, keep PPOTrainer's own sampler, and a dataset that returns the same row each time "
                "it is read"
            )
            trainer._mistakes.notes.append((str(error), error))
        trainer._mistakes.raise_everywhere(trainer.state.global_step)
        self._taken = rollout
        is_drawn = bool(rollout.answers.result().ids)  # else a server has failed, and the present weights draw anew
        trainer.metrics.stale(self._staleness(rollout) if is_drawn else 0)
        return rollout

    def started(self) -> dict[int, Started]:
        """Return the calls of reward functions already under way for the rollout last taken, by function index."""
        return self._taken.started if self._taken is not None else {}

    def settle(self) -> None:
        """Wait until all answers that are being generated have arrived."""
        self._wait_for(list(self.pending.values()))

    def _wait_for(self, rollouts: list[Flight]) -> None:
        """Wait for the answers of `rollouts`; an error on one process is raised on all processes."""
        trainer = self.trainer
        with trainer.metrics.timed("generate_wait"):
            for rollout in rollouts:
                if rollout.output is not None and (error := rollout.output.exception()) is not None:
                    trainer._mistakes.notes.append((str(error), error))
        trainer._mistakes.raise_everywhere(trainer.state.global_step)
        for rollout in rollouts:
            if not rollout.answers.done():
                _, ids, *sampled = self._generate(rollout, lambda *_, rollout=rollout, **__: rollout.output.result())
                rows = [torch.tensor(row) for row in sampled_logprobs(ids, *sampled)] if ids else []
                logprobs = pad_sequence(rows, batch_first=True) if ids else torch.empty(0)
                rollout.answers.set_result(Answers(ids, logprobs))

    def _submit(self, rollout: Flight) -> None:
        is_alone, before = self.trainer.accelerator.num_processes == 1, self.pending.get(rollout.number - 1)

        def ask(generate: Callable, kwargs: dict[str, Any], future: Future) -> None:
            try:
                output = generate(**kwargs)
                if before is not None and before.output is not None:
                    before.output.exception()  # rewards are asked in the order of the rollouts
                if is_alone:  # else only the first process has the answers
                    self._start_rewards(rollout, Answers(output["completion_ids"], torch.empty(0)))
                future.set_result(output)
            except BaseException as error:  # else the trainer would wait for this output for ever
                future.set_exception(error)

        def put_aside(generate: Callable, **kwargs: Any) -> dict[str, Any]:
            rollout.output = Future()
            threading.Thread(target=ask, args=(generate, kwargs, rollout.output), daemon=True).start()
            answers = len(kwargs["prompts"]) * kwargs["n"]
            return {"prompt_ids": kwargs["prompts"], "completion_ids": [[]] * answers, "logprobs": None}

        self._generate(rollout, put_aside)

    def _generate(self, rollout: Flight, answer: Callable[..., dict[str, Any]]) -> tuple:
        vllm = self.trainer.vllm_generation
        asked = {"prompts": rollout.prompts, "images": None, "num_generations": self.trainer.num_generations}
        with ExitStack() as stack:
            if self.trainer.accelerator.is_main_process:
                generate = partial(answer, vllm.vllm_client.generate)
                stack.enter_context(temporarily(vllm, vllm_client=SimpleNamespace(generate=generate)))
            return type(vllm).generate(vllm, **asked)  # `check_logprobs` would refuse the first call's empty answers

    # ---- Prompts ----

    def _prepare(self, number: int, version: int) -> Flight:
        trainer = self.trainer
        rows, token_ids = with_prompts(self._rows(number), trainer._tokenizer)
        prompts = token_ids or trainer._tokenize_prompts([row["prompt"] for row in rows])[0]
        return Flight(number, version, rows, prompts)

    def _rows(self, number: int) -> list[dict[str, Any]]:
        """Return the dataset rows of rollout `number` that belong to this process."""
        trainer, args = self.trainer, self.trainer.args
        size, local = args.generation_batch_size, args.generation_batch_size // trainer.accelerator.num_processes
        epoch, place = divmod(number, len(trainer.train_dataset) // (size // trainer.num_generations))
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, trainer._get_train_sampler().rollouts_of(epoch)
        begin = place * size + trainer.accelerator.process_index * local
        rows = [trainer.train_dataset[row] for row in self._order[1][begin : begin + local]]
        if not args.remove_unused_columns:
            return rows
        trainer._set_signature_columns_if_needed()
        return [{name: row[name] for name in row if name in trainer._signature_columns} for row in rows]

    # ---- Rewards ----

    def _start_rewards(self, rollout: Flight, answers: Answers) -> None:
        """Start the reward functions that run in the background, each once it has scored the previous rollout."""
        try:
            self._start_each(rollout, answers)
        except Exception as error:  # what is not started here is started when the rollout is taken up, and fails there
            logger.warning(
                f"The scoring of rollout {rollout.number} did not start early ({error!r}). It starts when the rollout "
                "is trained on."
            )

    def _start_each(self, rollout: Flight, answers: Answers) -> None:
        trainer = self.trainer
        places = [place for place, function in enumerate(self._functions) if function.in_background]
        if not places or not answers.ids:  # there are no ids if a server has failed
            return
        texts = self._tokenizer.batch_decode(answers.ids, skip_special_tokens=True)
        prompts = [row["prompt"] for row in rollout.rows]
        is_chat = is_conversational({"prompt": prompts[0]})
        completions = [[{"role": "assistant", "content": text}] for text in texts] if is_chat else texts
        ended = [ids[-1] in trainer.eos_token_ids for ids in answers.ids]
        inputs = with_answers(rollout.rows, rollout.prompts, ended)
        given = given_to_rewards(inputs, prompts, completions, answers.ids)
        state = copy.copy(trainer.state)  # functions see the step of the weights, though training goes on meanwhile
        state.global_step = rollout.version * self._optimizer_steps
        with self._starting:
            for place in places:
                function = _called_after(self._last.get(place), self._functions[place].function)
                rollout.started[place] = self._last[place] = Started(function, **given, trainer_state=state)

    @property
    def _optimizer_steps(self) -> int:
        """Return the number of optimizer steps on each rollout."""
        return self.trainer._steps_per_rollout // self.trainer.args.gradient_accumulation_steps

    def _staleness(self, rollout: Flight) -> int:
        """Return how many optimizer steps lie between the weights that drew a rollout and the present weights."""
        return (rollout.number - rollout.version) * self._optimizer_steps

    # ---- Checkpoints ----

    def state_dict(self) -> list[dict[str, Any]]:
        """
        Return the rollouts that are generated but not yet trained on, for the checkpoint.

        A resumed run could not generate them again, since it no longer has the weights that drew them. Call `settle`
        first, so that their answers are there. Processes do not wait for each other in this method.
        """
        return [
            {
                "number": rollout.number,
                "version": rollout.version,
                "prompts": rollout.prompts,
                "ids": rollout.answers.result().ids,
                "logprobs": rollout.answers.result().logprobs,
            }
            for rollout in self.pending.values()
        ]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """
        Restore the rollouts that `state_dict` returned, and start scoring them.

        If a run that was changed (`resume_anyway`) has other prompts, its rollouts are generated anew instead.
        """
        rollouts = [self._prepare(kept["number"], kept["version"]) for kept in state]
        is_of_these = all(rollout.prompts == kept["prompts"] for rollout, kept in zip(rollouts, state, strict=True))
        if self.trainer._is_changed and not all(gather_object([is_of_these])):  # `resume_anyway`
            logger.warning(
                "The checkpoint's answers belong to other prompts than this run's, so they are generated again."
            )
            return
        for rollout, kept in zip(rollouts, state, strict=True):
            rollout.prompts = kept["prompts"]  # which are compared with those that the Trainer delivers
            answers = Answers(kept["ids"], kept["logprobs"])
            rollout.answers.set_result(answers)
            self.pending[rollout.number] = rollout
            self._start_rewards(rollout, answers)


def _called_after(before: Started | None, function: Callable) -> Callable:
    """Return a function that first waits until the call `before`, if any, has ended, and then calls `function`."""

    def called(**kwargs: Any) -> Any:
        if before is not None:
            before.wait()
        return awaited(function(**kwargs))

    return called
