"""Compute confidence intervals: of a statistic by the bootstrap, of a share by Wilson, of an accuracy over prompts."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from statistics import NormalDist

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

    The bootstrap (Efron, 1979) says how a figure would vary on other samples of the same size. To compare two systems
    on the same prompts, pass the N differences of their values: in these, what makes one prompt harder than another
    cancels.

    Args:
        values: (N,) one finite value for each row, or (N, K) for a statistic of K columns.
        statistic: maps (resamples, N) or (resamples, N, K) to (resamples,). The default is the mean.
        level: share of resamples within the interval.
        resamples: how often N rows are sampled with replacement.
        seed: seed of the sampling, which does not use the global generator.
    """
    values = values.detach().double().cpu()
    generator = torch.Generator().manual_seed(seed)
    most = max(_AT_ONCE // len(values), 1)
    drawn = [
        statistic(values[torch.randint(len(values), (min(most, resamples - start), len(values)), generator=generator)])
        for start in range(0, resamples, most)
    ]
    low, high = torch.cat(drawn).quantile(torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.double))
    return low.item(), high.item()


def wilson_interval(share: float, count: float, level: float = 0.95) -> tuple[float, float]:
    """Return Wilson's confidence interval of a share (1927), which is valid for few rows and for shares of 0 and 1.

    With z the normal quantile, its bounds are (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n).

    Args:
        share: p, in [0, 1].
        count: n, the number of rows.
        level: probability that the interval contains the true share.
    """
    z = NormalDist().inv_cdf((1 + level) / 2)
    middle, half = share + z * z / (2 * count), z * (share * (1 - share) / count + (z / (2 * count)) ** 2) ** 0.5
    scale = 1 + z * z / count
    return max((middle - half) / scale, 0.0), min((middle + half) / scale, 1.0)


def pairwise_accuracy(margins: Tensor) -> Tensor:
    """Return the share of pairs whose chosen answer scores higher; a tie counts one half.

    Args:
        margins: (…, N) score of the chosen answer minus score of the rejected one.

    Returns:
        (…,) in [0, 1].
    """
    return credit(margins).mean(-1)


def credit(margins: Tensor) -> Tensor:
    """Return for each pair 1 if the chosen answer scores higher, one half for a tie, else 0; float64."""
    return (margins > 0).double() + (margins == 0).double() / 2


def accuracy_interval(margins: Tensor, prompts: Sequence[Hashable], few: int = 30) -> tuple[float, float]:
    """Return a 95 % confidence interval of the accuracy, by resampling prompts, each with all of its pairs.

    Pairs that share a prompt, such as those of a ranking, are not independent. So prompts are resampled, not pairs (a
    bootstrap of clusters). With few prompts a bootstrap says too little, so Wilson's interval is returned, for as many
    rows as there are prompts.

    Args:
        margins: (N,) score of the chosen answer minus score of the rejected one.
        prompts: for each pair, what identifies its prompt, such as its text.
        few: number of prompts below which the interval is Wilson's.
    """
    table = sums_by_prompt(torch.stack([credit(margins), torch.ones(len(margins))], 1), prompts)
    if len(table) < few:
        return wilson_interval(pairwise_accuracy(margins).item(), len(table))
    return bootstrap_interval(table, lambda drawn: drawn[..., 0].sum(1) / drawn[..., 1].sum(1))


def sums_by_prompt(columns: Tensor, prompts: Sequence[Hashable]) -> Tensor:
    """Return the sums of (N, K) columns over the rows of each prompt, in the order of the prompts' first rows."""
    place: dict[Hashable, int] = defaultdict(lambda: len(place))
    rows = torch.tensor([place[prompt] for prompt in prompts])
    return torch.zeros(len(place), columns.size(1), dtype=torch.double).index_add_(0, rows, columns.double())
