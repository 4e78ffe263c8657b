"""Change β in training: by the drift of all pairs, or for each source of pairs."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..functional import (
    adaptive_kl_coef,
    empty_moments,
    margin_scales,
    merge_moments,
    moments,
    preference_drift,
    standard_deviation,
)
from .config import DPOConfig


@dataclass(frozen=True)
class Pairs:
    """Hold the log-ratios of pairs' completions: log-prob under the policy minus that under the reference, nats."""

    chosen: Tensor  # (B,)
    rejected: Tensor  # (B,)
    sources: Tensor  # (B,) int, indices into the list of sources, −1 for an unknown one

    @property
    def margins(self) -> Tensor:
        """Return the margins Δ, (B,), nats: the chosen completions' log-ratios minus the rejected completions'."""
        return self.chosen - self.rejected

    def gathered(self, accelerator: Any) -> "Pairs":
        """Return the (N,) pairs of all processes, in order of process, detached and on the CPU."""
        stacked = torch.stack(
            [self.chosen.detach().float(), self.rejected.detach().float(), self.sources.float()], dim=1
        )
        chosen, rejected, sources = accelerator.gather(stacked).cpu().unbind(dim=1)
        return Pairs(chosen, rejected, sources.long())


class DriftController:
    """
    Adapt β so that `logps/drift`, the mean of |log-ratio| over the pairs' completions, stays at a target.

    Every process passes the pairs of all processes, so all processes compute the same β.

    Args:
        args: a [`DPOConfig`]. Only `drift_target`, `beta_min` and `beta_max` are used.
        horizon: pairs over which β can change by about 20 %.
    """

    def __init__(self, args: DPOConfig, horizon: float):
        self.args = args
        self.horizon = horizon
        self.restart()

    def restart(self) -> None:
        """Begin an optimizer step, also after one that was interrupted."""
        self._drift = 0.0  # sum over the step's pairs, nats
        self._pairs = 0

    def observe(self, pairs: Pairs) -> None:
        """Add a micro-batch's (N,) pairs, which [`Pairs.gathered`] has gathered from all processes."""
        drift = preference_drift(pairs.chosen.double(), pairs.rejected.double())
        self._drift += drift.sum().item()
        self._pairs += len(drift)

    def step(self, beta: float) -> float:
        """End an optimizer step that used `beta`, and return the β of the next step."""
        assert self.args.drift_target is not None
        beta = adaptive_kl_coef(beta, self._drift / self._pairs, self.args.drift_target, self._pairs, self.horizon)
        self.restart()
        return max(self.args.beta_min, min(beta, self.args.beta_max or math.inf))


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
        self.sources = sources
        self.warmup_pairs = warmup_pairs
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
        """Compute the factors from the moments of the sources that have enough pairs."""
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
