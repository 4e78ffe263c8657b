"""Change β in training: by the margins or the drift of all pairs, or for each source of pairs."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..functional import (
    adaptive_kl_coef,
    beta_dpo,
    empty_moments,
    keep_typical,
    margin_scales,
    merge_moments,
    moments,
    preference_drift,
    standard_deviation,
)
from .config import DPOConfig

_EMPTY = (0.0, 0)  # the sum of drifts and their number, when there is none yet


@dataclass(frozen=True)
class Pairs:
    """Hold the log-ratios of pairs' answers: log-prob under the policy minus log-prob under the reference, nats."""

    chosen: Tensor  # (B,)
    rejected: Tensor  # (B,)
    sources: Tensor  # (B,) int, indices into the list of sources, −1 for an unknown one

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def margins(self) -> Tensor:
        """Return the margins Δ, (B,), nats: the chosen answers' log-ratios minus the rejected answers'."""
        return self.chosen - self.rejected

    def gathered(self, accelerator: Any) -> "Pairs":
        """Return the (N,) pairs of all processes, in order of process, detached and on the CPU."""
        stacked = torch.stack(
            [self.chosen.detach().float(), self.rejected.detach().float(), self.sources.float()], dim=1
        )
        chosen, rejected, sources = accelerator.gather(stacked).cpu().unbind(dim=1)
        return Pairs(chosen, rejected, sources.long())


class BetaController:
    """
    Keep β fixed, set it from a batch's margins (`beta_dpo`, 2407.08639), or adapt it so that `logps/drift`, the mean
    of |log-ratio| over the pairs' answers, stays at a target (`drift`).

    Every process passes the pairs of all processes to the methods, so all processes compute the same β.

    Args:
        args: a [`DPOConfig`], of which the settings `beta…` and `drift…`, and the seed, are used.
        horizon: pairs over which the drift controller can change β by about 20 %.
    """

    def __init__(self, args: DPOConfig, horizon: float):
        self.args, self.horizon = args, horizon
        self.margin_mean, self.margin_std = 0.0, 1.0  # M₀ and σ, nats
        self._generator = torch.Generator().manual_seed(args.seed)
        self._drift = _EMPTY  # of this optimizer step: the sum of the pairs' drifts, nats, and the number of pairs

    def draw(self, pairs: Pairs) -> Tensor | None:
        """
        If `beta_dpo_keep` is below 1, sample which of the N `pairs` of all processes to train on, and return an (N,)
        bool mask of these; else return None.
        """
        if self.args.beta_controller != "beta_dpo" or self.args.beta_dpo_keep == 1:
            return None
        count = max(1, int(self.args.beta_dpo_keep * len(pairs)))
        uniform = torch.rand(len(pairs), generator=self._generator, dtype=torch.double).clamp(min=1e-300)
        return keep_typical(_margins(pairs), self.margin_mean, max(self.margin_std, 1e-6), count, uniform)

    def observe(self, beta: float, pairs: Pairs, kept: Tensor | None = None) -> float:
        """
        Record a micro-batch's pairs, and return the β for its loss.

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
                margins, past = _margins(pairs), self.args.beta_dpo_momentum
                margin = (margins if kept is None else margins[kept]).mean().item()
                beta = self._bounded(beta_dpo(self.args.beta, margin, self.margin_mean, self.args.beta_dpo_alpha))
                self.margin_mean = past * self.margin_mean + (1 - past) * margins.mean().item()  # for the next batch
                if len(margins) > 1:
                    self.margin_std = past * self.margin_std + (1 - past) * margins.std().item()
        return beta

    def step(self, beta: float) -> float:
        """End an optimizer step that used `beta`, and return the β of the next step; only `drift` changes it here."""
        (total, pairs), self._drift = self._drift, _EMPTY
        if self.args.beta_controller != "drift" or not pairs:
            return beta
        assert self.args.drift_target is not None
        return self._bounded(adaptive_kl_coef(beta, total / pairs, self.args.drift_target, pairs, self.horizon))

    def _bounded(self, beta: float) -> float:
        return max(self.args.beta_min, min(beta, self.args.beta_max or math.inf))

    def state_dict(self) -> dict:
        return {
            "margin_mean": self.margin_mean,
            "margin_std": self.margin_std,
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: dict) -> None:
        self.margin_mean, self.margin_std = state["margin_mean"], state["margin_std"]
        self._generator.set_state(state["generator"])
        self._drift = _EMPTY  # a step that was interrupted restarts


def _margins(pairs: Pairs) -> Tensor:
    return pairs.chosen.double() - pairs.rejected.double()


class MarginNormalizer:
    """
    Multiply β by a factor for each source of pairs, so that β times the margin has about the same spread in all.

    The factors come from the standard deviations of all margins so far, over all processes. They change only after an
    optimizer step, so they do not depend on how a step is cut into micro-batches.

    Args:
        sources: names of the sources. Pairs name a source by its index in this list.
        warmup_pairs: a source's factor is 1 until this many of its pairs were seen.
    """

    def __init__(self, sources: list[str], warmup_pairs: int):
        self.sources, self.warmup_pairs = sources, warmup_pairs
        self._moments = [empty_moments("cpu") for _ in sources]
        self._pending: list[Pairs] = []  # pairs of this optimizer step
        self.factors = torch.ones(len(sources) + 1)  # (S + 1,), the last one for unknown sources

    def observe(self, pairs: Pairs) -> None:
        """Keep until `step` a micro-batch's (N,) pairs, which [`Pairs.gathered`] has gathered from all processes."""
        self._pending.append(pairs)

    def factors_of(self, sources: Tensor) -> Tensor:
        """Return the (B,) factors of pairs, given the index of each pair's source, −1 for an unknown one."""
        return self.factors.to(sources.device)[sources]

    def step(self) -> None:
        """End an optimizer step: add the pairs observed in it to their sources' moments, and update the factors."""
        for pairs in self._pending:
            for i, past in enumerate(self._moments):
                self._moments[i] = merge_moments(torch.stack([past, moments(pairs.margins, pairs.sources == i)]))
        self._pending.clear()
        self._update_factors()

    def _update_factors(self) -> None:
        stacked = torch.stack(self._moments)
        warm = stacked[:, 0] >= self.warmup_pairs
        self.factors = torch.ones(len(self.sources) + 1)
        if warm.any():
            scales = margin_scales(standard_deviation(stacked[warm]), stacked[warm, 0])
            self.factors[:-1][warm] = scales.to(self.factors.dtype)

    def state_dict(self) -> dict:
        return {"sources": self.sources, "moments": torch.stack(self._moments)}

    def load_state_dict(self, state: dict) -> None:
        """Load the moments of the sources in the state; a source that is missing from the state starts empty."""
        known = dict(zip(state["sources"], state["moments"].unbind(), strict=True))
        self._moments = [known.get(source, empty_moments("cpu")) for source in self.sources]
        self._pending.clear()  # a step that was interrupted restarts
        self._update_factors()
