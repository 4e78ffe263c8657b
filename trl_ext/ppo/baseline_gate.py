"""Weigh the critic against a mean return, by how well the critic predicts returns before it is fitted to them."""

from typing import Any

import torch
from torch import Tensor

from ..functional import critic_weight

_DECAY = 0.9  # factor of the sum over earlier rollouts, at each new rollout


class BaselineGate:
    """
    Hold the critic's weight in the baseline (`baseline: gated`).

    For each rollout [`critic_products`] gives two numbers, and each is summed over the rollouts so far. The weight is
    [`critic_weight`] of the two sums. In a sum a rollout counts 0.9 times as much as the next one. Both sums begin at
    0, so after n rollouts both are too small by the same factor 1 − 0.9ⁿ, which cancels in their quotient.
    """

    def __init__(self):
        self.products = torch.zeros(2, dtype=torch.float64)

    def update(self, products: Tensor) -> float:
        """Add the (2,) `critic_products` of a rollout of all processes; return the weight for this rollout."""
        self.products = _DECAY * self.products + products.detach().cpu().double()
        return self.weight

    @property
    def weight(self) -> float:
        return critic_weight(self.products)

    def state_dict(self) -> dict[str, Any]:
        return {"products": self.products}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.products = state["products"]
