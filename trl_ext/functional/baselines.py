"""Compute the baseline that is subtracted from returns: the critic's values, a mean return, or a mixture of both."""

import torch
from torch import Tensor

from .masking import masked_sum
from .shapes import check_shapes


def mean_baselines(sums: Tensor, counts: Tensor, group_size: int = 1) -> Tensor:
    """Return, for each answer, the mean return b to subtract from the answer's own returns.

    With one answer per prompt, b is the mean over all answers: b = sum_j s_j / sum_j n_j (Williams 1992). With
    several, b is the mean over the other answers to the same prompt: b_i = sum_{j != i} s_j / sum_{j != i} n_j over
    the group (RLOO, Ahmadian et al. 2024, arXiv:2402.14740). If none of the other answers has a return, b is the
    mean over all answers.

    Args:
        sums: (N,), s, the sum of each answer's returns, score units.
        counts: (N,), n, how many returns each sum has; 0 for an answer that takes no part.
        group_size: number of answers to each prompt; they are consecutive rows.

    Returns:
        (N,), score units; 0 if no answer has a return.

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
    """Return the five sums that `critic_products` needs: n, sum g, sum d, sum g d, sum d^2; g = G - b, d = V - b.

    The sums of disjoint parts, such as those of several processes, add up to the sums of the whole.

    Args:
        returns: (B, T), Monte Carlo returns G, score units.
        values: (B, T), the critic's V from before the critic is fitted to these returns, score units.
        baselines: (B,), the mean returns b of `mean_baselines`, score units.
        mask: (B, T), 1 = token at which an action starts; only these are counted.

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
    """Compute (n cov(g, d), n var(d)), shape (2,), from the (5,) sums of `weight_sums`; both are 0 if n is 0."""
    count, gains, signals, products, squares = sums.unbind()
    count = count.clamp(min=1)
    return torch.stack([products - gains * signals / count, squares - signals.square() / count])


def critic_weight(products: Tensor) -> float:
    """Return the critic's weight w in the baseline w V + (1 - w) b: cov(g, d) / var(d), clamped to [0, 1].

    With g = G - b and d = V - b, the return minus this baseline is g - w d, whose variance is least at this w, the
    coefficient of a control variate. w is 1 for a critic that is right on average (the mean of g at each d is d), and
    0 for a critic whose predictions have nothing to do with the returns. w is above 1/2 exactly where Var(G - V) <
    Var(G - b). With one answer per prompt, that is where the explained variance is above 0, the point at which EVPO
    (arXiv:2604.19485) switches from the mean to the critic.

    Args:
        products: (2,), as `critic_products` returns them, or sums of them over several rollouts, decayed or not.

    Returns:
        w; 0 if the critic's predictions V differ from b by a constant only.
    """
    product, square = products.tolist()
    return min(max(product / square, 0.0), 1.0) if square > 0 else 0.0


def mix_baselines(advantages: Tensor, returns: Tensor, baselines: Tensor, mask: Tensor, weight: float) -> Tensor:
    """Mix the critic's advantages A with the returns minus a mean: w A + (1 - w) (G - b); 0 under the mask.

    Args:
        advantages: (B, T), A of `gae`, score units.
        returns: (B, T), Monte Carlo returns G, score units.
        baselines: (B,), the mean returns b, score units.
        mask: (B, T), 1 = real token.
        weight: w, in [0, 1]: 1 gives A alone, 0 gives G - b alone.

    Returns:
        (B, T), score units.

    Raises:
        ValueError: shapes do not fit, or the weight is not in [0, 1].
    """
    check_shapes(ndim=2, advantages=advantages, returns=returns, mask=mask)
    check_shapes(returns=returns[:, 0], baselines=baselines)
    if not 0 <= weight <= 1:
        raise ValueError(f"weight must be in [0, 1], got {weight}; use what critic_weight() returns.")
    mixed = weight * advantages + (1 - weight) * (returns - baselines[:, None].to(returns))
    return torch.where(mask.bool(), mixed, 0.0)
