"""Compute the baseline that is subtracted from returns: the critic's values, a mean return, or a mixture of both."""

import torch
from torch import Tensor

from .masking import check_shapes, masked_mean


def mean_baselines(returns: Tensor, mask: Tensor, group_size: int | None = None) -> Tensor:
    """Return for the k-th action of each answer the mean return b of the other answers, from their k-th action on.

    b_i,k = mean over j != i of G_j,min(k, K_j), where G_j,k is the return from the k-th action of answer j on, and K_j
    its number of actions: an answer that has ended enters with its last return. The mean is over all other answers, or
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
    """
    check_shapes(returns=returns, mask=mask)
    size = group_size or len(returns)
    number, (held,), acts = _by_number(mask, returns)
    last = (acts.sum(1, keepdim=True) - 1).clamp(min=0)
    held = held.gather(1, torch.arange(returns.size(1), device=returns.device).minimum(last))
    acts = acts[:, :1].expand_as(held).to(held)
    others, sizes = (x.view(-1, size, x.size(1)).sum(1).repeat_interleave(size, 0) - x for x in (held * acts, acts))
    of_all = masked_mean(returns, mask).to(held)
    return torch.where(sizes > 0, others / sizes.clamp(min=1), of_all).gather(1, number)


def critic_products(returns: Tensor, values: Tensor, mask: Tensor, group_size: int | None = None) -> Tensor:
    """Return (sum (g - mean g)(d - mean d), sum (d - mean d)^2) over all actions; g = G - m, d = V - m.

    m_i,k is the mean of G_j,k over the answers j of i's group that have a k-th action, **i included**. So g sums to 0
    over these answers, and the first sum is 0 for a critic that gives them one value. The means of `mean_baselines`
    leave i out, so G - b and V - b would share -b: for a constant V the first sum would be n times the second.
    Including i errs towards the mean: for a critic that is right, whose values vary by v within the n answers while e
    is left of the returns' variance, the quotient is about (n - 1) v / ((n - 1) v + e), not 1. An action that no other
    answer has is not counted.

    Args:
        returns: (N, T), Monte Carlo returns G, score units.
        values: (N, T), the critic's V from before the critic is fitted to these returns, score units.
        mask, group_size: as in `mean_baselines`.

    Returns:
        (2,), float64 (float32 on devices without float64). The second is 0 where d varies by rounding alone.
    """
    check_shapes(returns=returns, values=values, mask=mask)
    size = group_size or len(returns)
    precise = torch.float32 if returns.device.type == "mps" else torch.float64
    _, (g, v), acts = _by_number(mask, returns.to(precise), values.to(precise))
    g, v, acts = (x.view(-1, size, x.size(1)) for x in (g, v, acts))
    count = acts.sum(1, keepdim=True)
    means, counted = g.sum(1, keepdim=True) / count.clamp(min=1), acts & (count > 1)
    gains, signals = ((x - means)[counted] for x in (g, v))
    centred = signals - signals.mean() if len(signals) else signals
    square = centred.square().sum()
    rounding = 1e-9 * signals.square().sum()
    return torch.stack([(gains * centred).sum(), torch.where(square > rounding, square, 0.0)])


def _by_number(mask: Tensor, *each: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return the number of each token's action, (N, T) of `each` in order of these numbers, and where they are."""
    actions = mask.long()
    number = (actions.cumsum(1) - 1).clamp(min=0)
    ordered = [torch.zeros_like(x).scatter_add(1, number, torch.where(mask.bool(), x, 0.0)) for x in each]
    return number, ordered, torch.arange(mask.size(1), device=mask.device) < actions.sum(1, keepdim=True)


def critic_weight(products: Tensor) -> float:
    """Return the critic's weight w in the baseline w V + (1 - w) m: cov(g, d) / var(d), clamped to [0, 1].

    With g = G - m and d = V - m, the return minus this baseline is g - w d, whose variance is least at this w, the
    coefficient of a control variate. w nears 1 for a critic that is right on average (the mean of g at each d is d),
    and is 0 for a critic that gives all answers of a group one value. With one answer per prompt, w is above 1/2 where
    the explained variance is above 0, the point at which EVPO (arXiv:2604.19485) switches from the mean to the critic.

    Args:
        products: (2,), as `critic_products` returns them, or sums of them over several rollouts, decayed or not.

    Returns:
        w; 0 if the critic's predictions V differ from m by a constant only.
    """
    product, square = products.tolist()
    return min(max(product / square, 0.0), 1.0) if square > 0 else 0.0
