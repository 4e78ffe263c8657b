"""Compute the baseline that is subtracted from returns: a leave-one-out mean, or its mixture with the critic."""

import torch
from torch import Tensor

from .masking import check_shapes, masked_mean


def mean_baselines(returns: Tensor, mask: Tensor, group_size: int | None = None) -> Tensor:
    """Compute the baseline b of a completion's k-th action: the others' mean return from their own k-th action on.

    b_i,k = mean over j != i of G_j,min(k, K_j). G_j,k is the return of completion j from its k-th action on, and K_j
    the number of its actions. An action is a token that the policy sampled, or a whole turn. A completion with fewer
    than k actions enters with the return from its last action. j runs over all other completions, or with `group_size`
    over the other completions of the same prompt.

    If each completion has a single score, b is the baseline of REINFORCE (Williams 1992) and of RLOO (Ahmadian et al.
    2024, arXiv:2402.14740). If rewards also come before the end, a completion's return from its last actions on is
    still not compared with the return of a whole completion, since k is the same. b does not depend on the
    completion's own actions (unless no other completion has any), so it leaves the policy's gradient unbiased.

    Args:
        returns: (N, T), G, score units.
        mask: (N, T), 1 = token at which an action starts.
        group_size: number of completions of each prompt, in consecutive rows; None to compare all N completions.

    Returns:
        (N, T), score units. Each token has the b of the last action that has started; tokens before the first action
        have the b of the first action. Where no other completion of the group has an action, b is the mean over all
        actions of all N completions.
    """
    check_shapes(returns=returns, mask=mask)
    size = group_size or len(returns)
    number, (held,), acts = _by_number(mask, returns)
    # A completion with fewer actions enters with the return from its last one
    last = (acts.sum(1, keepdim=True) - 1).clamp(min=0)
    held = held.gather(1, torch.arange(returns.size(1), device=returns.device).minimum(last))
    acts = acts[:, :1].expand_as(held).to(held)  # from here on: whether the completion has any action
    held = held * acts
    sums, counts = (x.view(-1, size, x.size(1)).sum(1).repeat_interleave(size, 0) for x in (held, acts))
    others = sums - held
    sizes = counts - acts
    of_all = masked_mean(returns, mask).to(held)
    return torch.where(sizes > 0, others / sizes.clamp(min=1), of_all).gather(1, number)


def critic_products(returns: Tensor, values: Tensor, mask: Tensor, group_size: int | None = None) -> Tensor:
    """Return the two sums that `critic_weight` divides: sum (g - mean g)(d - mean d) and sum (d - mean d)^2.

    For a completion's k-th action, with the return G and the critic's value V, g = G - m and d = V - m. m is the mean
    of G over the k-th actions of all n completions of the group that have one, **the completion itself included**. The
    sums run over all actions except those with n = 1.

    So g sums to 0 over these n completions, and the first sum is 0 for a critic that gives them all the same value.
    The baseline b of `mean_baselines`, which leaves the completion out, cannot replace m: G - b and V - b would share
    -b, and for a constant V the first sum would be n times the second.

    Including the completion makes the critic's weight too small. If the values of an exact critic have variance v
    within the n completions, and the returns have variance e around these values, the quotient of the sums is about
    r / (r + e) with r = (n - 1) v, instead of 1.

    Args:
        returns: (N, T), Monte Carlo returns G, score units.
        values: (N, T), the critic's V from before the critic is fitted to these returns, score units.
        mask, group_size: as in `mean_baselines`.

    Returns:
        (2,), float64 (float32 on devices without float64). The second sum is 0 where d varies by rounding alone.
    """
    check_shapes(returns=returns, values=values, mask=mask)
    size = group_size or len(returns)
    precise = torch.float32 if returns.device.type == "mps" else torch.float64
    _, (g, v), acts = _by_number(mask, returns.to(precise), values.to(precise))
    g, v, acts = (x.view(-1, size, x.size(1)) for x in (g, v, acts))
    count = acts.sum(1, keepdim=True)
    means = g.sum(1, keepdim=True) / count.clamp(min=1)
    counted = acts & (count > 1)
    gains, signals = ((x - means)[counted] for x in (g, v))
    centred = signals - signals.mean() if len(signals) else signals
    square = centred.square().sum()
    # A critic that differs from m by a constant only has no variance but that of rounding
    rounding = 1e-9 * signals.square().sum()
    return torch.stack([(gains * centred).sum(), torch.where(square > rounding, square, 0.0)])


def _by_number(
    mask: Tensor,  # (N, T), 1 where an action starts
    *each: Tensor,  # (N, T)
) -> tuple[Tensor, list[Tensor], Tensor]:  # (N, T) each
    """Number each row's actions from 0; return each token's number, `each` by number, and which numbers exist."""
    actions = mask.long()
    number = (actions.cumsum(1) - 1).clamp(min=0)  # of the last action that has started; 0 before the first
    # The value at the start of action k in column k, 0 in columns without an action
    ordered = [torch.zeros_like(x).scatter_add(1, number, torch.where(mask.bool(), x, 0.0)) for x in each]
    is_action = torch.arange(mask.size(1), device=mask.device) < actions.sum(1, keepdim=True)
    return number, ordered, is_action


def critic_weight(products: Tensor) -> float:
    """Return the critic's weight w in the baseline w V + (1 - w) m: cov(g, d) / var(d), clamped to [0, 1].

    G is the return, m its mean, V the critic's value, all as in `critic_products`. With g = G - m and d = V - m, the
    return minus the baseline is g - w d. This w minimises its variance, as the coefficient of a control variate does.
    w approaches 1 for a critic that is right on average (the mean of g at each d is d), and is 0 for a critic that
    gives all completions of a group the same value. With one completion per prompt, w is above 1/2 where the explained
    variance is above 0, and there EVPO (arXiv:2604.19485) uses the critic instead of the mean.

    Args:
        products: (2,) sums that `critic_products` returns; those of several rollouts may be added, with or without
            decay.

    Returns:
        w, in [0, 1]; 0 if the critic's values V differ from m by a constant only.
    """
    product, square = products.tolist()
    return min(max(product / square, 0.0), 1.0) if square > 0 else 0.0
