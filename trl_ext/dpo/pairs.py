"""Hold the log-ratios of a micro-batch's pairs."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pairs:
    """Hold pairs' log-ratios: log-probs under the policy minus log-probs under the reference, nats."""

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
        """Gather the (N,) pairs of all processes, in the processes' order; they are detached and on the CPU."""
        stacked = torch.stack(
            [self.chosen.detach().float(), self.rejected.detach().float(), self.sources.float()], dim=1
        )
        chosen, rejected, sources = accelerator.gather(stacked).cpu().unbind(dim=1)
        return Pairs(chosen, rejected, sources.long())
