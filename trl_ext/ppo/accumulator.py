"""Accumulate metrics exactly over tokens, micro-batches and processes: never as a mean of means."""

import torch
from accelerate import Accelerator
from torch import Tensor

from ..functional import merge_moments, moments


class Accumulator:
    """Accumulate count, mean, variance, minimum and maximum of each metric's entries, from one `pop` to the next."""

    def __init__(self):
        self._moments: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor | float, mask: Tensor | None = None) -> None:
        """
        Add the entries of `values` where `mask` is 1 to the metric `name`.

        Between two calls of `pop`, every process must add to the same metrics.
        """
        values = torch.tensor(values, dtype=torch.float64) if isinstance(values, (int, float)) else values
        new = moments(values, mask)
        old = self._moments.get(name)
        self._moments[name] = new if old is None else merge_moments(torch.stack([old.to(new.device), new]))

    def pop(self, accelerator: Accelerator) -> dict[str, Tensor]:
        """Return the (5,) moments of each metric's entries on all processes, by name, and delete the entries."""
        names = sorted(self._moments)
        if not names:
            return {}
        local = torch.stack([self._moments[name].to(accelerator.device) for name in names])
        parts = accelerator.gather(local[None]).cpu()  # (processes, metrics, 5)
        self._moments.clear()
        return {name: merge_moments(parts[:, i]) for i, name in enumerate(names)}

    def not_finite(self) -> list[str]:
        """Return the names of the metrics that got a NaN or an infinity on this process since the last `pop`."""
        return sorted(name for name, value in self._moments.items() if value[0] > 0 and not value[1:].isfinite().all())

    def state_dict(self) -> dict[str, Tensor]:
        return {name: value.cpu() for name, value in self._moments.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._moments = dict(state)


def global_moments(accelerator: Accelerator, values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute the (5,) moments of the entries where `mask` is 1, over all processes; all get the same result."""
    return merge_moments(accelerator.gather(moments(values, mask)[None]))
