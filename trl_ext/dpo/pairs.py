"""What one micro-batch says of its pairs."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pairs:
    """Log-ratios of pairs: log-probs under the policy minus under the reference, nats."""

    chosen: Tensor  # (B,)
    rejected: Tensor  # (B,)
    sources: Tensor  # (B,) int, places in the list of sources, −1 for none of them

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def margins(self) -> Tensor:
        """Δ, (B,), nats."""
        return self.chosen - self.rejected

    def gathered(self, accelerator: Any) -> "Pairs":
        """The (N,) pairs of all processes, in the order of the processes, detached and on the CPU; one collective."""
        stacked = torch.stack(
            [self.chosen.detach().float(), self.rejected.detach().float(), self.sources.float()], dim=1
        )
        chosen, rejected, sources = accelerator.gather(stacked).cpu().unbind(dim=1)
        return Pairs(chosen, rejected, sources.long())
