"""A β for each source of pairs."""

import torch
from torch import Tensor

from ..functional import empty_moments, margin_scales, merge_moments, moments, standard_deviation


class MarginNormalizer:
    """
    Factors that bring the margins of all sources to one scale, from their standard deviations so far.

    It is given the pairs of all processes, so it is the same on each without being synchronised, and moves after an
    optimizer step, so it does not depend on how a step is cut into micro-batches.
    """

    def __init__(self, sources: list[str], warmup_pairs: int):
        self.sources, self.warmup_pairs = sources, warmup_pairs
        self._moments = [empty_moments("cpu") for _ in sources]
        self._pending: list[tuple[Tensor, Tensor]] = []  # margins and source codes of this optimizer step
        self.factors = torch.ones(len(sources) + 1)  # the last one is for sources that are not known

    def observe(self, margins: Tensor, codes: Tensor) -> None:
        """
        See a micro-batch.

        Args:
            margins: (N,), nats, on the CPU, of all processes.
            codes: (N,) int, places in `sources`, −1 for none of them.
        """
        self._pending.append((margins, codes))

    def step(self) -> None:
        """Take what was seen into the moments after an optimizer step."""
        for margins, codes in self._pending:
            for i, known in enumerate(self._moments):
                self._moments[i] = merge_moments(torch.stack([known, moments(margins, codes == i)]))
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
        if state["sources"] != self.sources:
            raise ValueError(
                f"The checkpoint knows the sources {state['sources']}, the datasets have {self.sources}: resume with "
                "the datasets of the interrupted run, or start anew."
            )
        self._moments = list(state["moments"].unbind())
        self._update_factors()
