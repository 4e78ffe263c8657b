"""Give each source of pairs a β of its own."""

import torch
from torch import Tensor

from ..functional import empty_moments, margin_scales, merge_moments, moments, standard_deviation
from .pairs import Pairs


class MarginNormalizer:
    """
    Multiply β by a factor for each source of pairs, so that the margins of all sources have about the same spread.

    The factors come from the standard deviations of all margins so far, over all processes. They change only after an
    optimizer step, so they do not depend on how a step is cut into micro-batches.

    Args:
        sources: names of the sources. Pairs name a source by its index in this list.
        warmup_pairs: a source's factor is 1 until it has had this many pairs.
    """

    def __init__(self, sources: list[str], warmup_pairs: int):
        self.sources, self.warmup_pairs = sources, warmup_pairs
        self._moments = [empty_moments("cpu") for _ in sources]
        self._pending: list[Pairs] = []  # pairs of this optimizer step
        self.factors = torch.ones(len(sources) + 1)  # (S + 1,), the last one for unknown sources

    def observe(self, pairs: Pairs) -> None:
        """Keep a micro-batch's (N,) pairs, of all processes and on the CPU, until `step`."""
        self._pending.append(pairs)

    def factors_of(self, sources: Tensor) -> Tensor:
        """Look up the factors of (B,) pairs by their sources."""
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
        """Load the moments of the sources that the state knows; other sources start anew."""
        known = dict(zip(state["sources"], state["moments"].unbind(), strict=True))
        self._moments = [known.get(source, empty_moments("cpu")) for source in self.sources]
        self._pending.clear()  # a step that was interrupted begins anew
        self._update_factors()
