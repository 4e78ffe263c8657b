"""β, and how it moves."""

import math

import torch
from torch import Tensor

from ..functional import adaptive_kl_coef, beta_dpo, keep_typical, preference_drift
from .config import DPOConfig

_EMPTY = (0.0, 0)


class BetaController:
    """
    Holds `beta`: constant, set by each batch's margins (`beta_dpo`, 2407.08639), or steered to a drift (`drift`).

    It is given the pairs of all processes, so it is the same on each without being synchronised.
    """

    def __init__(self, args: DPOConfig, horizon: float):
        self.args, self.horizon = args, horizon
        self.beta = args.beta
        self.margin_mean, self.margin_std = 0.0, 1.0  # M₀ and σ, nats
        self._generator = torch.Generator().manual_seed(args.seed)
        self._drift = _EMPTY  # sum, nats, and pairs of this optimizer step

    def observe(self, chosen_logratios: Tensor, rejected_logratios: Tensor) -> Tensor | None:
        """
        See a micro-batch before its loss is computed.

        Args:
            chosen_logratios, rejected_logratios: (N,), nats, on the CPU, of all processes.

        Returns:
            (N,) bool, the pairs to train on; None for all.
        """
        match self.args.beta_controller:
            case "drift":
                drift = preference_drift(chosen_logratios.double(), rejected_logratios.double())
                self._drift = (self._drift[0] + drift.sum().item(), self._drift[1] + len(drift))
            case "beta_dpo":
                return self._observe_margins(chosen_logratios.double() - rejected_logratios.double())
        return None

    def _observe_margins(self, margins: Tensor) -> Tensor | None:
        args, kept = self.args, None
        if args.beta_dpo_keep < 1:
            count = max(1, int(args.beta_dpo_keep * len(margins)))
            uniform = torch.rand(len(margins), generator=self._generator, dtype=torch.double).clamp(min=1e-300)
            kept = keep_typical(margins, self.margin_mean, max(self.margin_std, 1e-6), count, uniform)
        margin = (margins if kept is None else margins[kept]).mean().item()
        self.beta = self._bounded(beta_dpo(args.beta, margin, self.margin_mean, args.beta_dpo_alpha))
        # The batch's own moments count from the next batch on
        past = args.beta_dpo_momentum
        self.margin_mean = past * self.margin_mean + (1 - past) * margins.mean().item()
        if len(margins) > 1:
            self.margin_std = past * self.margin_std + (1 - past) * margins.std().item()
        return kept

    def step(self) -> None:
        """Move β after an optimizer step."""
        (total, pairs), self._drift = self._drift, _EMPTY
        if self.args.beta_controller == "drift" and pairs:
            assert self.args.drift_target is not None
            self.beta = self._bounded(
                adaptive_kl_coef(self.beta, total / pairs, self.args.drift_target, pairs, self.horizon)
            )

    def _bounded(self, beta: float) -> float:
        maximum = math.inf if self.args.beta_max is None else self.args.beta_max
        return max(self.args.beta_min, min(beta, maximum))

    def state_dict(self) -> dict:
        return {
            "kind": self.args.beta_controller,
            "beta": self.beta,
            "margin_mean": self.margin_mean,
            "margin_std": self.margin_std,
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: dict) -> None:
        if state["kind"] != self.args.beta_controller:
            raise ValueError(
                f"The checkpoint was written with `beta_controller={state['kind']!r}`, this run has "
                f"{self.args.beta_controller!r}: use the same, or start anew."
            )
        self.beta = state["beta"]
        self.margin_mean, self.margin_std = state["margin_mean"], state["margin_std"]
        self._generator.set_state(state["generator"])
