"""What is subtracted from returns: the critic's values, a mean return, or a mixture of the two."""

import torch
from torch import Tensor

from .masking import masked_sum
from .shapes import check_shapes


def mean_baselines(sums: Tensor, counts: Tensor, group_size: int = 1) -> Tensor:
    """Return for each answer the mean return that it is compared with.

    With one answer a prompt, the mean of all: b = sum_j s_j / sum_j n_j (Williams 1992). With several, the mean of the
    other answers to the prompt: b_i = sum_{j != i} s_j / sum_{j != i} n_j over the group (RLOO, Ahmadian et al. 2024,
    arXiv:2402.14740); where no other one has an entry, the mean of all.

    Args:
        sums: (N,), sums of each answer's returns, score units.
        counts: (N,), how many returns each sum has; 0 for an answer that takes no part.
        group_size: answers to one prompt, which stand together.

    Returns:
        (N,), score units; 0 where there is no return.

    Raises:
        ValueError: shapes differ, or N is no multiple of group_size.
    """
    check_shapes(ndim=1, sums=sums, counts=counts)
    if group_size < 1 or len(sums) % group_size:
        raise ValueError(
            f"group_size must divide the N = {len(sums)} answers, got {group_size}; pass whole groups of answers."
        )
    of_all = (sums.sum() / counts.sum().clamp(min=1)).expand_as(sums)
    others, sizes = (x.view(-1, group_size).sum(1).repeat_interleave(group_size) - x for x in (sums, counts))
    return torch.where(sizes > 0, others / sizes.clamp(min=1), of_all) if group_size > 1 else of_all


def weight_sums(returns: Tensor, values: Tensor, baselines: Tensor, mask: Tensor) -> Tensor:
    """Return what `critic_products` reads: n, sum g, sum d, sum g d and sum d^2, with g = G - b and d = V - b.

    Sums of disjoint parts add up to those of the whole.

    Args:
        returns: (B, T), Monte Carlo returns G, score units.
        values: (B, T), the critic's V, before it is fitted to these returns, score units.
        baselines: (B,), b, score units.
        mask: (B, T), 1 = where an action starts.

    Returns:
        (5,), float64 (float32 on devices without float64).

    Raises:
        ValueError: shapes do not fit.
    """
    check_shapes(ndim=2, returns=returns, values=values, mask=mask)
    check_shapes(returns=returns[:, 0], baselines=baselines)
    precise = torch.float32 if returns.device.type == "mps" else torch.float64
    gains, signals = (x.to(precise) - baselines.to(precise)[:, None] for x in (returns, values))
    each = (torch.ones_like(gains), gains, signals, gains * signals, signals.square())
    return torch.stack([masked_sum(x, mask) for x in each])


def critic_products(sums: Tensor) -> Tensor:
    """Return n cov(g, d) and n var(d) of the (5,) sums of `weight_sums`, (2,); 0 without an entry."""
    count, gains, signals, products, squares = sums.unbind()
    count = count.clamp(min=1)
    return torch.stack([products - gains * signals / count, squares - signals.square() / count])


def critic_weight(products: Tensor) -> float:
    """Return the weight of the critic in the baseline that leaves the least variance: cov(g, d) / var(d) in [0, 1].

    With the baseline w V + (1 - w) b, the variance of G - w V - (1 - w) b = g - w d is least at this w, the
    coefficient of a control variate. It is 1 for a critic whose differences are right on average, and 0 for one whose
    predictions have nothing to do with the returns. It is above 1/2 exactly where Var(G - V) < Var(G - b): with one
    answer a prompt, where the explained variance is above 0. There EVPO (arXiv:2604.19485) switches from the mean to
    the critic.

    Args:
        products: (2,), of `critic_products`, also decayed sums over several rollouts.

    Returns:
        A share; 0 where the critic's predictions differ from b by a constant.
    """
    product, square = products.tolist()
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
