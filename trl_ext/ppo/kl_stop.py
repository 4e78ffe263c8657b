"""Stop updating on a rollout when the approximate KL is too large."""

import torch
from torch import Tensor


class ApproxKLStop:
    """
    Add up the approximate KL over the micro-batches of a minibatch, and say if its mean per token exceeds a limit.

    Args:
        limit: largest mean KL, nats per token; None for no limit.
    """

    def __init__(self, limit: float | None):
        self.limit = limit
        self.start()

    def start(self) -> None:
        """Set the sums to 0, for the next minibatch."""
        self._sums = torch.zeros(2)

    def add(self, kl: Tensor) -> None:
        """Add a micro-batch's (2,) sums over all processes: its KL in nats, and its number of tokens."""
        self._sums = self._sums.to(kl) + kl

    @property
    def is_exceeded(self) -> bool:
        return self.limit is not None and bool(self._sums[0] > self.limit * self._sums[1])
