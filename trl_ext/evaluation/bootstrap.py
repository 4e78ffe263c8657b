"""Compute bootstrap confidence intervals (Efron, 1979): how a figure would vary on other samples of the same size."""

from collections.abc import Callable

import torch
from torch import Tensor

_AT_ONCE = 2**22  # rows that are drawn at once: all resamples of a large set would fill gigabytes


def bootstrap_interval(
    values: Tensor,
    statistic: Callable[[Tensor], Tensor] = lambda resampled: resampled.mean(1),
    level: float = 0.95,
    resamples: int = 4000,
    seed: int = 0,
) -> tuple[float, float]:
    """Return a statistic's confidence interval: its quantiles (1 − level)/2 and (1 + level)/2 over resampled rows.

    To compare two systems on the same prompts, pass the N differences of their values: in these, what makes one prompt
    harder than another cancels.

    Args:
        values: (N,) one value for each row, or (N, K) for a statistic of K columns.
        statistic: maps (resamples, N) or (resamples, N, K) to (resamples,). The default is the mean.
        level: share of resamples within the interval.
        resamples: how often N rows are sampled with replacement.
        seed: seed of the sampling, which does not use the global generator.

    Raises:
        ValueError: no rows, a value that is not finite, or `level` outside (0, 1).
    """
    if len(values) == 0 or not values.isfinite().all():
        raise ValueError(
            f"one or more values are needed, all finite; got {len(values)}, {int((~values.isfinite()).sum())} of them "
            "not finite: leave out rows without a value"
        )
    if not 0 < level < 1:
        raise ValueError(f"level must lie within (0, 1), got {level}: pass a share such as 0.95")
    values = values.detach().double().cpu()
    generator = torch.Generator().manual_seed(seed)
    most = max(_AT_ONCE // len(values), 1)
    drawn = [
        statistic(values[torch.randint(len(values), (min(most, resamples - start), len(values)), generator=generator)])
        for start in range(0, resamples, most)
    ]
    low, high = torch.cat(drawn).quantile(torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.double))
    return low.item(), high.item()
