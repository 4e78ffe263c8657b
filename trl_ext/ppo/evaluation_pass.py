"""Evaluate sampled completions of prompts, without changing the state of training."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor

from ..models.generation import forked_rng


@dataclass
class EvaluationRows:
    """
    Count the rows of one pass over an evaluation set, to leave out the copies that pad the last batch.

    Args:
        total: number of rows to evaluate: the set's rows times the completions of each.
        seen: number of rows of the batches so far, of all processes, copies included.
    """

    total: int
    seen: int = 0

    def next_are_real(self, size: int, accelerator: Accelerator) -> Tensor:
        """
        Advance to the next batch, of `size` rows on each process of `accelerator`. Return a (size,) bool for this
        process's rows: False for the copies that pad the last batch.
        """
        first = self.seen + size * accelerator.process_index
        self.seen += size * accelerator.num_processes
        return first + torch.arange(size, device=accelerator.device) < self.total


def sampling_seed(args: Any, process: int) -> int:
    """
    Return the seed for sampling completions in the process with number `process`. `args` is the [`PPOConfig`].

    Processes that share a vLLM engine get the same seed.
    """
    together = args.vllm_tensor_parallel_size if args.use_vllm and args.vllm_mode == "colocate" else 1
    return args.seed + process // together


@contextmanager
def untouched_rng(accelerator: Accelerator, args: Any, number: int = 0) -> Iterator[None]:
    """
    Seed all random generators, of the CPU and of the device of `accelerator`, within the `with` block; restore them
    afterwards. The seed depends on the settings `args` ([`PPOConfig`]) and the process; another `number`, such as the
    step, gives another seed.
    """
    python = random.getstate()
    numpy = np.random.get_state()
    with forked_rng(accelerator.device):
        set_seed((sampling_seed(args, accelerator.process_index) + number * accelerator.num_processes) % 2**32)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
