"""Generate answers in a second process, with a copy of the policy."""

import os
import pickle
import threading
import traceback
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from .decoding import decode
from .generation import neutral_generation, padded, seeded, up_to_eos
from .sampler import SamplerRecorder


@dataclass(frozen=True)
class Job:
    """Describe a rollout to generate: its weights, prompts and seed determine the answers."""

    number: int  # number of the rollout, from 0
    version: int  # version of the policy's weights
    prompts: list[list[int]]  # token ids of B prompts
    seed: int


@dataclass(frozen=True)
class Answers:
    """Hold B answers of up to T tokens."""

    ids: list[list[int]]  # up to and including EOS
    logprobs: Tensor  # (B, T) float32, nats, under the distribution of the draws; 0 after an answer's end


@dataclass(frozen=True)
class Setup:
    """
    Tell the second process which model to build, where its weights are, and how to generate with it.

    The weights are in a shared file of `slots` parts, each with all weights of one version.
    """

    model_class: type
    config: Any  # transformers'
    buffers: dict[str, Tensor]
    layout: dict[str, tuple[torch.Size, torch.dtype, int]]  # name → shape, dtype, place in a slot in bytes
    slot_bytes: int
    slots: int
    device: str
    autocast: torch.dtype | None
    generation_config: GenerationConfig
    eos_token_ids: list[int]
    batch_size: int  # prompts to answer at once
    threads: int

    def slot(self, memory: Tensor, version: int) -> dict[str, Tensor]:
        """Return the weights of a version by name, as views of `memory`, the (bytes,) of the shared file."""
        start, weights = version % self.slots * self.slot_bytes, {}
        for name, (shape, dtype, place) in self.layout.items():
            begin = start + place
            weights[name] = memory[begin : begin + shape.numel() * dtype.itemsize].view(dtype).view(shape)
        return weights


class Sampler:
    """
    Generate with a copy of the policy, as the trainer would.

    Args:
        setup: the model, and how to generate with it.
        memory: the (bytes,) of the shared file, with the weights.
    """

    def __init__(self, setup: Setup, memory: Tensor):
        self.setup = setup
        self.memory = memory
        self.device = torch.device(setup.device)
        default = torch.get_default_dtype()
        torch.set_default_dtype(next(dtype for _, dtype, _ in setup.layout.values() if dtype.is_floating_point))
        try:  # else bfloat16 weights would take the memory of float32 for a moment
            with self.device:
                self.model: Any = setup.model_class(setup.config)
        finally:
            torch.set_default_dtype(default)
        self.version: int | None = None
        parameters, buffers = dict(self.model.named_parameters()), dict(self.model.named_buffers())
        if unknown := parameters.keys() ^ setup.layout.keys() or buffers.keys() ^ setup.buffers.keys():
            raise ValueError(
                f"a {setup.model_class.__name__} made from the policy's configuration has other weights than the "
                f"policy ({', '.join(sorted(unknown)[:3])}): have its class build them from the configuration alone"
            )
        for name, (shape, dtype, _) in setup.layout.items():
            parameters[name].data = torch.empty(shape, dtype=dtype, device=self.device)
        for name, values in setup.buffers.items():
            buffers[name].data = values.to(self.device)
        self.model.eval().requires_grad_(False)

    def load(self, version: int) -> None:
        """Copy the weights of `version` from the shared file into the model, unless it has them already."""
        if version == self.version:
            return
        weights = self.setup.slot(self.memory, version)
        for name, parameter in self.model.named_parameters():
            parameter.data.copy_(weights[name])
        self.version = version

    @torch.no_grad()
    def draw(self, job: Job) -> Answers:
        """Generate the answers of rollout `job`; the global random state stays as it was."""
        setup, recorder, ids = self.setup, SamplerRecorder(), []
        self.load(job.version)
        autocast = nullcontext() if setup.autocast is None else torch.autocast(self.device.type, setup.autocast)
        with neutral_generation(self.model), seeded(job.seed, self.device), autocast:
            for start in range(0, len(job.prompts), setup.batch_size):
                prompts, mask = padded(job.prompts[start : start + setup.batch_size], "left", self.device)
                sequences = decode(
                    self.model,
                    recorder,
                    input_ids=prompts,
                    attention_mask=mask,
                    generation_config=setup.generation_config,
                )
                drawn = sequences[:, prompts.size(1) :].tolist()
                ids += [up_to_eos(row, setup.eos_token_ids) for row in drawn]
        logprobs = recorder.take(ids)
        if logprobs is None:
            raise RuntimeError("this way of generating records no log-probs, but `rollouts_ahead` needs them")
        return Answers(ids, pad_sequence([torch.tensor(row) for row in logprobs], batch_first=True))


def memory_of(fd: int, size: int) -> Tensor:
    """Map an open file of `size` bytes into a (size,) tensor, shared with all processes that have the file open."""
    import mmap

    return torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)


def serve(pipe_fd: int, memory_fd: int, parent: int) -> None:
    """
    Generate the answers of each job that comes in, until the trainer is gone or something fails.

    Args:
        pipe_fd: file descriptor of the connection. A `Setup` and then `Job`s come in; `Answers`, or the text of an
            error, go out.
        memory_fd: file descriptor of the shared file with the weights.
        parent: the trainer's process id.
    """
    pipe, messages = Connection(pipe_fd), SimpleQueue[bytes]()
    threading.Thread(target=_listen, args=(pipe, messages, parent), daemon=True).start()
    try:
        setup: Setup = pickle.loads(messages.get())
        torch.set_num_threads(setup.threads)
        sampler = Sampler(setup, memory_of(memory_fd, setup.slots * setup.slot_bytes))
        while True:
            job: Job = pickle.loads(messages.get())
            pipe.send_bytes(pickle.dumps((job.number, sampler.draw(job))))
    except BaseException as error:
        traceback.print_exc()
        pipe.send_bytes(pickle.dumps((None, f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")))
        os._exit(1)


def _listen(pipe: Connection, messages: SimpleQueue[bytes], parent: int) -> None:
    """Queue the messages that come in; when the trainer is gone, end this process, even amid a generation."""
    try:
        while True:
            if pipe.poll(1.0):
                messages.put(pipe.recv_bytes())
            elif os.getppid() != parent:  # the pipe may stay open in another child of the trainer
                break
    except (EOFError, OSError):
        pass
    os._exit(0)


def check_class(model: nn.Module) -> None:
    """Raise a `ValueError` if another process cannot import the model's class."""
    kind = type(model)
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise ValueError(
            f"`rollouts_ahead` builds a {kind.__qualname__} in a second process, and that process cannot import it "
            f"from {kind.__module__}. Define the class at the top level of a module."
        )
