"""Let a vLLM server generate the next rollout while the trainer trains on the one before."""

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from ..upstream.temporarily import temporarily
from .inputs import with_prompts
from .vllm import sampled_logprobs

Answers = tuple[list[list[int]], list[list[float]]]  # the tokens of each answer, and their log-probs


@dataclass
class Flight:
    """Hold a rollout that is being generated ahead of time."""

    version: int  # on how many rollouts the weights that generate this one have been trained
    prompts: list[list[int]]  # token ids
    output: Future = field(default_factory=Future)  # on the first process: the server's answer
    answers: Answers | None = None  # on all processes, once they have arrived


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
        self.pending: dict[int, Flight] = {}  # by the rollout's number, from 0

    def take(self, prompt_ids: list[list[int]]) -> Answers:
        """
        Start the rollouts that the current weights have to generate, then wait for the current rollout and return it.

        Args:
            prompt_ids: the prompts that the Trainer delivers. If the rollout was generated for other prompts, all
                processes raise a `RuntimeError`.
        """
        trainer = self.trainer
        number = trainer._step // trainer._steps_per_rollout
        micro_batches = trainer.state.max_steps * trainer.args.gradient_accumulation_steps
        end = math.ceil(micro_batches / trainer._steps_per_rollout)
        wanted = range(number, min(number + trainer.args.rollouts_ahead + 1, end))
        if new := [n for n in wanted if n not in self.pending]:
            self.settle()  # no weights may change under a generation
            with trainer.metrics.timed("sync_weights"):
                trainer.vllm_generation.sync_weights()
                trainer._last_loaded_step = trainer.state.global_step
            for n in new:
                self.pending[n] = flight = Flight(number, self._prompts(n))
                self._generate(flight, partial(_put_aside, flight))
        self._wait_for([self.pending[number]])
        flight = self.pending.pop(number)
        if flight.prompts != prompt_ids:
            error = RuntimeError(
                "keep PPOTrainer's own sampler, and a dataset that returns the same row each time it is read"
            )
            trainer._mistakes.note(f"rollout {number} was generated for other prompts than the dataloader's", error)
        trainer._mistakes.raise_everywhere(trainer.state.global_step)
        assert flight.answers is not None
        trainer.metrics.stale((number - flight.version) * trainer.args.steps_per_rollout)
        return flight.answers

    def settle(self) -> None:
        """Wait until all answers that are being generated have arrived."""
        self._wait_for(list(self.pending.values()))

    def _wait_for(self, flights: list[Flight]) -> None:
        trainer = self.trainer
        with trainer.metrics.timed("generate_wait"):
            for flight in flights:
                if trainer.accelerator.is_main_process and (error := flight.output.exception()) is not None:
                    trainer._mistakes.note("vLLM", error)
        trainer._mistakes.raise_everywhere(trainer.state.global_step)
        for flight in flights:
            if flight.answers is None:
                _, ids, *sampled = self._generate(flight, lambda *_, flight=flight, **__: flight.output.result())
                flight.answers = ids, sampled_logprobs(ids, *sampled)

    def _generate(self, flight: Flight, answer: Callable[..., dict[str, Any]]) -> tuple:
        """Let TRL generate, with `answer` in place of its client's `generate`, which `answer` gets first."""
        vllm = self.trainer.vllm_generation
        client: Any = nullcontext()
        if self.trainer.accelerator.is_main_process:
            generate = partial(answer, vllm.vllm_client.generate)
            client = temporarily(vllm, vllm_client=SimpleNamespace(generate=generate))
        with client:  # by its class: `check_logprobs` would refuse the first call's empty answers
            return type(vllm).generate(
                vllm, prompts=flight.prompts, images=None, num_generations=self.trainer.num_generations
            )

    def _prompts(self, number: int) -> list[list[int]]:
        """Return the prompts' token ids of the rows of rollout `number` that belong to this process."""
        trainer, args = self.trainer, self.trainer.args
        size, local = args.generation_batch_size, args.generation_batch_size // trainer.accelerator.num_processes
        epoch, place = divmod(number, len(trainer.train_dataset) // (size // trainer.num_generations))
        order = trainer._get_train_sampler().rollouts_of(epoch)
        begin = place * size + trainer.accelerator.process_index * local
        rows = [trainer.train_dataset[row] for row in order[begin : begin + local]]
        rows, token_ids = with_prompts(rows, trainer._tokenizer)
        return token_ids or trainer._tokenize_prompts([row["prompt"] for row in rows])[0]


def _put_aside(flight: Flight, generate: Callable, **kwargs: Any) -> dict[str, Any]:
    """Send a request in a thread, and return empty answers at once."""

    def ask() -> None:
        try:
            flight.output.set_result(generate(**kwargs))
        except BaseException as error:  # else the trainer would wait for this output for ever
            flight.output.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    return {
        "prompt_ids": kwargs["prompts"],
        "completion_ids": [[]] * len(kwargs["prompts"]) * kwargs["n"],
        "logprobs": None,
    }
