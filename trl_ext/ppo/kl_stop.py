"""Stop updating on a rollout when the approximate KL is too large."""

import torch
from torch import Tensor


class ApproxKLStop:
    """
    Add up the approximate KL of a minibatch over its micro-batches, and tell when its mean exceeds a limit.

    Args:
        limit: nats per token; None for no limit.
    """

    def __init__(self, limit: float | None):
        self.limit = limit
        self._sums = torch.zeros(2)

    def start(self) -> None:
        """Begin a minibatch."""
        self._sums = torch.zeros(2)

    def add(self, kl: Tensor) -> None:
        """Add a micro-batch: (2,), the sum of its KL, nats, and its tokens, both of all processes."""
        self._sums = self._sums.to(kl) + kl

    @property
    def is_exceeded(self) -> bool:
        return self.limit is not None and bool(self._sums[0] > self.limit * self._sums[1])
