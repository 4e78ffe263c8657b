"""Weigh the critic against a mean return, by how well it has predicted what it was not yet fitted to."""

from typing import Any

import torch
from torch import Tensor

from ..functional import critic_products, critic_weight

_DECAY = 0.9  # of what earlier rollouts have shown, per rollout


class BaselineGate:
    """
    Hold the critic's weight in the baseline (`baseline: gated`).

    It is [`critic_weight`] of products over the rollouts so far, in which a rollout counts 0.9 times the next one.
    Both begin at 0 and lack the same factor 1 − 0.9ⁿ after n rollouts, so that their quotient needs no correction.
    """

    def __init__(self):
        self.products = torch.zeros(2, dtype=torch.float64)

    def update(self, sums: Tensor) -> float:
        """Take the (5,) `weight_sums` of a rollout, over all processes; return the weight for this rollout."""
        self.products = _DECAY * self.products + critic_products(sums.detach().cpu().double())
        return self.weight

    @property
    def weight(self) -> float:
        return critic_weight(self.products)

    def state_dict(self) -> dict[str, Any]:
        return {"products": self.products}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.products = state["products"]
