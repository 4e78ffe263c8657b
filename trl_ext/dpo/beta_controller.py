"""Change β during training, by the rule that the setting `beta_controller` names."""

import math

import torch
from torch import Tensor

from ..functional import adaptive_kl_coef, beta_dpo, keep_typical, preference_drift
from .config import DPOConfig
from .pairs import Pairs

_EMPTY = (0.0, 0)  # the sum of drifts and their number, when there is none yet


class BetaController:
    """
    Keep β fixed, set it from each batch's margins (`beta_dpo`, 2407.08639), or steer the drift to a target (`drift`).

    Every process passes in the pairs of all processes, so every process computes the same β.

    Args:
        args: the settings `beta…` and `drift…`, and the seed.
        horizon: pairs over which the drift controller can change β by about 20 %.
    """

    def __init__(self, args: DPOConfig, horizon: float):
        self.args, self.horizon = args, horizon
        self.margin_mean, self.margin_std = 0.0, 1.0  # M₀ and σ, nats
        self._generator = torch.Generator().manual_seed(args.seed)
        self._drift = _EMPTY  # of this optimizer step: the sum of the pairs' drifts, nats, and the number of pairs

    def draw(self, pairs: Pairs) -> Tensor | None:
        """Draw at random the pairs to train on; return them as an (N,) mask, bool, or None to train on all pairs."""
        if self.args.beta_controller != "beta_dpo" or self.args.beta_dpo_keep == 1:
            return None
        count = max(1, int(self.args.beta_dpo_keep * len(pairs)))
        uniform = torch.rand(len(pairs), generator=self._generator, dtype=torch.double).clamp(min=1e-300)
        return keep_typical(_margins(pairs), self.margin_mean, max(self.margin_std, 1e-6), count, uniform)

    def observe(self, beta: float, pairs: Pairs, kept: Tensor | None = None) -> float:
        """
        Observe a micro-batch, and return the β for its loss, which is computed next.

        Args:
            beta: the present β, 1 / nats.
            pairs: (N,), of all processes, on the CPU.
            kept: (N,) mask, bool, of the pairs that are trained on; None for all.
        """
        match self.args.beta_controller:
            case "drift":
                drift = preference_drift(pairs.chosen.double(), pairs.rejected.double())
                self._drift = (self._drift[0] + drift.sum().item(), self._drift[1] + len(drift))
            case "beta_dpo":
                margins = _margins(pairs)
                margin = (margins if kept is None else margins[kept]).mean().item()
                beta = self._bounded(beta_dpo(self.args.beta, margin, self.margin_mean, self.args.beta_dpo_alpha))
                self._update_moments(margins)  # for the next batch
        return beta

    def step(self, beta: float) -> float:
        """End an optimizer step whose β was `beta`; return the next step's β. Only `drift` changes β here."""
        (total, pairs), self._drift = self._drift, _EMPTY
        if self.args.beta_controller != "drift" or not pairs:
            return beta
        assert self.args.drift_target is not None
        return self._bounded(adaptive_kl_coef(beta, total / pairs, self.args.drift_target, pairs, self.horizon))

    def _update_moments(self, margins: Tensor) -> None:
        past = self.args.beta_dpo_momentum
        self.margin_mean = past * self.margin_mean + (1 - past) * margins.mean().item()
        if len(margins) > 1:
            self.margin_std = past * self.margin_std + (1 - past) * margins.std().item()

    def _bounded(self, beta: float) -> float:
        maximum = math.inf if self.args.beta_max is None else self.args.beta_max
        return max(self.args.beta_min, min(beta, maximum))

    def state_dict(self) -> dict:
        return {
            "margin_mean": self.margin_mean,
            "margin_std": self.margin_std,
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: dict) -> None:
        self.margin_mean, self.margin_std = state["margin_mean"], state["margin_std"]
        self._generator.set_state(state["generator"])
        self._drift = _EMPTY  # a step that was interrupted begins anew


def _margins(pairs: Pairs) -> Tensor:
    return pairs.chosen.double() - pairs.rejected.double()
