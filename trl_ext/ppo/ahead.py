"""Generate rollouts ahead of time, and start scoring them, while the trainer trains on an earlier one."""

import copy
import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.rnn import pad_sequence
from transformers.utils import logging

from ..models.rollout_process import RolloutProcess, layout_of
from ..models.rollout_worker import Answers, Job, Setup, check_class
from ..models.weights import base_model_of
from ..rewards.member import Started, awaited
from ..upstream.names import VLLMGeneration, is_conversational
from ..upstream.temporarily import temporarily
from .inputs import with_prompts
from .rollout import given_to_rewards, with_answers
from .vllm import sampled_logprobs

logger = logging.get_logger(__name__)


@dataclass
class Flight:
    """Hold a rollout that is being generated ahead of time."""

    number: int  # of the rollout, from 0
    version: int  # on how many rollouts the weights that generate this one have been trained
    rows: list[dict[str, Any]]  # dataset rows of this process
    prompts: list[list[int]]  # token ids
    answers: Future[Answers] = field(default_factory=Future)
    started: dict[int, Started] = field(default_factory=dict)  # calls of reward functions, by the function's index


class RolloutsAhead:
    """
    Generate rollouts ahead of time: rollout n is generated with the weights after training on rollout n − 1 − k.

    k is `rollouts_ahead`. The prompts of a rollout depend only on the seed and the rollout's number, so they are known
    before the Trainer delivers them. `take` checks that the Trainer delivers the same prompts. See docs/overlap.md.

    Args:
        trainer: the trainer that trains on the rollouts.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.pending: dict[int, Flight] = {}
        self._drawer = _Server(trainer) if trainer.use_vllm else _SecondProcess(trainer)
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
            if trainer.use_vllm:
                self.settle()  # no weights may change under a generation
            with trainer.metrics.timed("sync_weights"):
                self._drawer.publish(number)
            for rollout in new:
                self.pending[rollout.number] = rollout
                self._drawer.submit(rollout, partial(self._start_rewards, rollout))
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
                if (error := self._drawer.error_of(rollout)) is not None:
                    trainer._mistakes.notes.append((str(error), error))
        trainer._mistakes.raise_everywhere(trainer.state.global_step)
        for rollout in rollouts:
            self._drawer.deliver(rollout)

    def close(self) -> None:
        """Stop generating ahead of time."""
        self._drawer.close()

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


class _SecondProcess:
    """Generate in a second process, with a copy of the policy on a device of its own."""

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.process: RolloutProcess | None = None  # once there are weights

    def publish(self, version: int) -> None:
        if self.process is None:
            self.process = RolloutProcess(self._setup())
        self.process.publish(version, _named_weights(self.trainer))

    def submit(self, rollout: Flight, arrived: Callable[[Answers], None]) -> None:
        assert self.process is not None
        process = self.trainer.accelerator.process_index
        seed = ((self.trainer.args.seed * 1_000_003 + rollout.number) * 1_009 + process) % 2**63
        rollout.answers = self.process.submit(Job(rollout.number, rollout.version, rollout.prompts, seed), arrived)

    def error_of(self, rollout: Flight) -> BaseException | None:
        return rollout.answers.exception()

    def deliver(self, rollout: Flight) -> None:
        pass

    def close(self) -> None:
        if self.process is not None:
            self.process.close()

    def _setup(self) -> Setup:
        trainer, args = self.trainer, self.trainer.args
        base = base_model_of(trainer._actor_critic.policy)
        layout, slot_bytes = layout_of(_named_weights(trainer))
        buffers = {name.replace(".base_layer", ""): values.cpu() for name, values in base.named_buffers()}
        precisions = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return Setup(
            # FSDP2 puts a class of its own before the model's
            model_class=next(kind for kind in type(base).__mro__ if not issubclass(kind, FSDPModule)),
            config=base.config,
            buffers=buffers,
            layout=layout,
            slot_bytes=slot_bytes,
            slots=args.rollouts_ahead + 1,
            device=rollout_device(args),
            autocast=precisions.get(trainer.accelerator.mixed_precision),
            generation_config=trainer.generation_config,
            eos_token_ids=trainer.eos_token_ids,
            batch_size=args.local_rollout_forward_batch_size,
            threads=torch.get_num_threads(),
        )


def _named_weights(trainer: Any) -> Iterator[tuple[str, Tensor]]:
    """
    Yield each weight of the policy, whole and with adapters merged, under its name in the base model.

    Every process must iterate to the end, since processes gather sharded weights together.
    """
    source = VLLMGeneration.__new__(VLLMGeneration)
    vars(source).update(model=trainer._actor_critic.policy, accelerator=trainer.accelerator, _dist=trainer._dist)
    yield from source._iter_named_params()


class _Server:
    """
    Let a vLLM server generate while this process trains.

    TRL's `generate` has collectives, so all processes must call it at the same time. We call it twice. The first call
    starts a thread that sends the request, and returns empty answers. The second call, once the answers have arrived,
    returns them.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.output: dict[int, Future] = {}  # on the first process

    def publish(self, version: int) -> None:
        self.trainer.vllm_generation.sync_weights()
        self.trainer._last_loaded_step = self.trainer.state.global_step

    def submit(self, rollout: Flight, arrived: Callable[[Answers], None]) -> None:
        is_alone = self.trainer.accelerator.num_processes == 1

        def ask(generate: Callable, kwargs: dict[str, Any], future: Future) -> None:
            try:
                output = generate(**kwargs)
                if is_alone:  # else only the first process has the answers
                    arrived(Answers(output["completion_ids"], torch.empty(0)))
                future.set_result(output)
            except BaseException as error:  # else the trainer would wait for this output for ever
                future.set_exception(error)

        def put_aside(generate: Callable, **kwargs: Any) -> dict[str, Any]:
            future = self.output[rollout.number] = Future()
            threading.Thread(target=ask, args=(generate, kwargs, future), daemon=True).start()
            answers = len(kwargs["prompts"]) * kwargs["n"]
            return {"prompt_ids": kwargs["prompts"], "completion_ids": [[]] * answers, "logprobs": None}

        self._generate(rollout, put_aside)

    def error_of(self, rollout: Flight) -> BaseException | None:
        output = self.output.get(rollout.number)
        return None if output is None else output.exception()

    def deliver(self, rollout: Flight) -> None:
        if rollout.answers.done():
            return
        _, ids, *sampled = self._generate(rollout, lambda _, **__: self.output.pop(rollout.number).result())
        logprobs = [torch.tensor(row) for row in sampled_logprobs(ids, *sampled)] if ids else []
        rollout.answers.set_result(Answers(ids, pad_sequence(logprobs, batch_first=True) if ids else torch.empty(0)))

    def close(self) -> None:
        pass  # a request that is under way ends with the program, or by itself

    def _generate(self, rollout: Flight, answer: Callable[..., dict[str, Any]]) -> tuple:
        vllm = self.trainer.vllm_generation
        asked = {"prompts": rollout.prompts, "images": None, "num_generations": self.trainer.num_generations}
        with ExitStack() as stack:
            if self.trainer.accelerator.is_main_process:
                generate = partial(answer, vllm.vllm_client.generate)
                stack.enter_context(temporarily(vllm, vllm_client=SimpleNamespace(generate=generate)))
            return type(vllm).generate(vllm, **asked)  # `check_logprobs` would refuse the first call's empty answers


# ---- Checks ----


def rollout_device(args: Any) -> str:
    """
    Return the device on which the second process, which this process starts, generates.

    `args.rollout_device` names one device for all processes, or one for each, separated by commas; None is the CPU.
    """
    if args.rollout_device is None:
        return "cpu"
    names = [name.strip() for name in args.rollout_device.split(",")]
    return names[int(os.environ.get("LOCAL_RANK", 0)) % len(names)]


def check_ahead(args: Any, policy: Any, device: torch.device) -> None:
    """Raise a `ValueError` if this policy's rollouts cannot be generated ahead of time."""
    if args.use_vllm or not args.rollouts_ahead:
        return
    base = base_model_of(policy)
    if getattr(base.config, "quantization_config", None) is not None:
        raise ValueError(
            f"`rollouts_ahead={args.rollouts_ahead}` does not work with a quantised base: the second process would "
            "get merged weights, and generate with another policy than the trained one. Load the base unquantised, or "
            "set `rollouts_ahead=0`."
        )
    check_class(base)
    if args.rollout_device is None and device.type != "cpu":
        raise ValueError(
            f"`rollouts_ahead={args.rollouts_ahead}` generates in a second process, but `rollout_device` is not set "
            f"and training is on {device}. Name a device for that process, such as `rollout_device: cuda:1`."
        )
    names, processes = (args.rollout_device or "cpu").split(","), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if len(names) not in (1, processes):
        raise ValueError(
            f"`rollout_device={args.rollout_device}` names {len(names)} devices for {processes} process(es) on this "
            "machine. Name one device for all processes, or one for each."
        )
    name = rollout_device(args)
    try:
        found = torch.device(name)
    except RuntimeError:
        found = None
    there, count = torch.accelerator.current_accelerator(), torch.accelerator.device_count()
    counts = {"cpu": math.inf, there.type if there is not None else "": count}
    if found is None or (found.index or 0) >= counts.get(found.type, 0):
        raise ValueError(
            f"`rollout_device={args.rollout_device}` names {name!r}, which this machine does not have ({count} "
            "accelerators). Name another device, or `cpu`."
        )
