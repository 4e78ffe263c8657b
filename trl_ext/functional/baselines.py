"""What is subtracted from returns: the critic's values, the mean of other answers, or a mixture of the two."""

import torch
from torch import Tensor

from .masking import masked_sum
from .shapes import check_shapes


def others_means(sums: Tensor, counts: Tensor, group_size: int = 1) -> Tensor:
    """Return for each answer the mean return of the other answers: b_i = sum_{j != i} s_j / sum_{j != i} n_j.

    The mean is over the other answers to the same prompt, or, where no other has an entry, over all other answers. An
    answer takes no part in its own baseline, so that the baseline adds no bias (RLOO, Kool et al. 2019; Ahmadian et
    al. 2024, arXiv:2402.14740).

    Args:
        sums: (N,), sums of each answer's returns, score units.
        counts: (N,), how many returns each sum has; 0 for an answer that takes no part.
        group_size: answers to one prompt, which stand together.

    Returns:
        (N,), score units; 0 where no other answer has an entry.

    Raises:
        ValueError: shapes differ, or N is no multiple of group_size.
    """
    check_shapes(ndim=1, sums=sums, counts=counts)
    if group_size < 1 or len(sums) % group_size:
        raise ValueError(
            f"group_size must divide the N = {len(sums)} answers, got {group_size}; pass whole groups of answers."
        )

    def means(groups: int) -> tuple[Tensor, Tensor]:
        totals, sizes = (x.view(groups, -1).sum(1, keepdim=True) - x.view(groups, -1) for x in (sums, counts))
        return (totals / sizes.clamp(min=1)).flatten(), sizes.flatten()

    of_all, _ = means(1)
    of_group, others = means(len(sums) // group_size)
    return torch.where(others > 0, of_group, of_all)


def weight_sums(returns: Tensor, values: Tensor, baselines: Tensor, mask: Tensor) -> Tensor:
    """Return the two sums that `critic_weight` divides: sum (G - b)(V - b) and sum (V - b)^2.

    Sums of disjoint parts add up to those of the whole.

    Args:
        returns: (B, T), Monte Carlo returns G, score units.
        values: (B, T), the critic's V, before it is fitted to these returns, score units.
        baselines: (B,), b, score units.
        mask: (B, T), 1 = where an action starts.

    Returns:
        (2,), float64 (float32 on devices without float64), squared score units.

    Raises:
        ValueError: shapes do not fit.
    """
    check_shapes(ndim=2, returns=returns, values=values, mask=mask)
    check_shapes(returns=returns[:, 0], baselines=baselines)
    precise = torch.float32 if returns.device.type == "mps" else torch.float64
    gains, signals = (x.to(precise) - baselines.to(precise)[:, None] for x in (returns, values))
    return torch.stack([masked_sum(gains * signals, mask), masked_sum(signals.square(), mask)])


def critic_weight(sums: Tensor) -> float:
    """Return the weight of the critic in the baseline with the least variance: sum (G-b)(V-b) / sum (V-b)^2 in [0, 1].

    With the baseline w V + (1 - w) b, the squares of G - w V - (1 - w) b have their least sum at this w: the
    coefficient of a control variate. It is 1 for a critic that is right on average wherever it predicts the same, and
    0 for one whose predictions have nothing to do with the returns. It is above 1/2 exactly where the critic explains
    some of the variance, sum (G - V)^2 < sum (G - b)^2: there EVPO (arXiv:2604.19485) switches from one to the other.

    Args:
        sums: (2,), of `weight_sums`, also decayed sums over several rollouts.

    Returns:
        A share; 0 where the critic predicts b everywhere.
    """
    product, square = sums.tolist()
    return min(max(product / square, 0.0), 1.0) if square > 0 else 0.0


def mix_baselines(advantages: Tensor, returns: Tensor, baselines: Tensor, mask: Tensor, weight: float) -> Tensor:
    """Mix advantages over the critic with those over a mean: w A + (1 - w) (G - b) on real tokens, 0 under the mask.

    Args:
        advantages: (B, T), of `gae`, score units.
        returns: (B, T), Monte Carlo returns G, score units.
        baselines: (B,), b, score units.
        mask: (B, T), 1 = real token.
        weight: w: 1 leaves the critic's alone, 0 the return minus the mean.

    Returns:
        (B, T), score units.

    Raises:
        ValueError: shapes do not fit, or the weight is not in [0, 1].
    """
    check_shapes(ndim=2, advantages=advantages, returns=returns, mask=mask)
    check_shapes(returns=returns[:, 0], baselines=baselines)
    if not 0 <= weight <= 1:
        raise ValueError(f"weight must be in [0, 1], got {weight}; take that of critic_weight().")
    mixed = weight * advantages + (1 - weight) * (returns - baselines[:, None].to(returns))
    return torch.where(mask.bool(), mixed, 0.0)
