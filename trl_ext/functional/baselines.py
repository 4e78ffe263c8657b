"""Compute the baseline that is subtracted from returns: the critic's values, a mean return, or a mixture of both."""

import torch
from torch import Tensor

from .masking import masked_sum
from .shapes import check_shapes


def mean_baselines(returns: Tensor, mask: Tensor, group_size: int | None = None) -> Tensor:
    """Return for each action the mean return b of the other answers, from their action with the same number on.

    b_i,k = mean over j != i of G_j,min(k, K_j), where G_j,k is the return from the k-th action of answer j on, and K_j
    its number of actions: an answer that is over counts with its last return. The mean is over all other answers, or
    with groups over the other answers to the same prompt. Where each answer has one score, that is the baseline of
    REINFORCE (Williams 1992) and of RLOO (Ahmadian et al. 2024, arXiv:2402.14740); where scores come on the way, a
    mean of whole returns would compare an answer's end with the beginning of others. b does not depend on the answer's
    own actions, except where there is no other answer, so it leaves the policy's gradient unbiased.

    Args:
        returns: (N, T), G, score units.
        mask: (N, T), 1 = token at which an action starts.
        group_size: number of answers to each prompt, in consecutive rows; None to compare all N answers.

    Returns:
        (N, T), score units. Each token has the b of the last action that has started; before the first action, it has
        that of the first. Where no other answer of the group has an action, b is the mean over all actions of all N.

    Raises:
        ValueError: shapes differ, or N is no multiple of group_size.
    """
    check_shapes(ndim=2, returns=returns, mask=mask)
    size = len(returns) if group_size is None else group_size
    if size < 1 or len(returns) % size:
        raise ValueError(
            f"group_size must divide the N = {len(returns)} answers, got {group_size}; pass whole groups of answers."
        )
    actions = mask.long()
    number, count = (actions.cumsum(1) - 1).clamp(min=0), actions.sum(1, keepdim=True)
    masked = torch.where(mask.bool(), returns, 0.0)
    by_number = torch.zeros_like(returns).scatter_add(1, number, masked)
    last = (count - 1).clamp(min=0)
    held = by_number.gather(1, torch.arange(returns.size(1), device=returns.device).minimum(last))
    acts = (count > 0).to(returns)
    others, sizes = (x.view(-1, size, x.size(1)).sum(1).repeat_interleave(size, 0) - x for x in (held * acts, acts))
    of_all = masked.sum() / count.sum().clamp(min=1)
    return torch.where(sizes > 0, others / sizes.clamp(min=1), of_all).gather(1, number)


def weight_sums(returns: Tensor, values: Tensor, baselines: Tensor, mask: Tensor) -> Tensor:
    """Return the five sums that `critic_products` needs: n, sum g, sum d, sum g d, sum d^2; g = G - b, d = V - b.

    The sums of disjoint parts, such as those of several processes, add up to the sums of the whole.

    Args:
        returns: (B, T), Monte Carlo returns G, score units.
        values: (B, T), the critic's V from before the critic is fitted to these returns, score units.
        baselines: (B, T), the mean returns b of `mean_baselines`, score units.
        mask: (B, T), 1 = token at which an action starts; only these are counted.

    Returns:
        (5,), float64 (float32 on devices without float64).

    Raises:
        ValueError: shapes do not fit.
    """
    check_shapes(ndim=2, returns=returns, values=values, baselines=baselines, mask=mask)
    precise = torch.float32 if returns.device.type == "mps" else torch.float64
    gains, signals = (x.to(precise) - baselines.to(precise) for x in (returns, values))
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
