"""Token rewards from sequence scores, and advantages from token rewards."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .masking import last_token_index
from .shapes import check_shapes


def token_rewards(
    scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float, token_scores: Tensor | None = None
) -> Tensor:
    """Spread the score and the KL penalty over the tokens of each response.

    On real tokens r_t = -kl_coef kl_t + [t is the last real token] score; under the mask r_t = 0. A row without a real
    token gets no score. Ziegler et al. 2019, arXiv:1909.08593.

    With token scores x_t, r_t = -kl_coef kl_t + x_t before the last real token T, and the last one gets what is left:
    r_T = -kl_coef kl_T + score - sum_{t<T} x_t. So a row's rewards always sum to score - kl_coef sum kl_t, and x_T
    is not read.

    Args:
        scores: (B,), score units.
        kl: (B, T), nats, per token.
        mask: (B, T), 1 = real response token, EOS included.
        kl_coef: score units per nat.
        token_scores: (B, T), score units: the part of the score that belongs to each token; None for all 0.

    Returns:
        (B, T), score units.

    Raises:
        ValueError: kl is not 2-dimensional, or the shapes do not fit.
    """
    check_shapes(ndim=2, kl=kl, mask=mask)
    if scores.shape != kl.shape[:1]:
        raise ValueError(
            f"scores must be (B,) with the B = {kl.shape[0]} of kl, got shape {tuple(scores.shape)}; "
            "give one score per sequence."
        )
    rewards = torch.where(mask.bool(), -kl_coef * kl, 0.0)
    is_last = torch.arange(kl.shape[1], device=kl.device) == last_token_index(mask).unsqueeze(1)
    if token_scores is not None:
        check_shapes(kl=kl, token_scores=token_scores)
        earlier = torch.where(mask.bool() & ~is_last, token_scores, 0.0)
        rewards, scores = rewards + earlier, scores - earlier.sum(dim=1)
    return rewards + torch.where(is_last, scores.unsqueeze(1), 0.0)


def length_adaptive_lam(mask: Tensor, alpha: float) -> Tensor:
    """Give each response a lambda that depends on its length: lam = 1 - 1 / (alpha n), and 0 where alpha n <= 1.

    The weights lam^k of the errors after a token then sum to at most alpha n: the same share alpha of a response of n
    tokens, however long it is. Yue et al. 2025, arXiv:2504.05118, section 4.2.

    Args:
        mask: (B, T), 1 = real response token, EOS included.
        alpha: share of the response's length, above 0; 0.05 in that paper.

    Returns:
        (B,), float32, each in [0, 1); 0 for a row without a real token.

    Raises:
        ValueError: mask is not 2-dimensional, or alpha is not above 0.
    """
    check_shapes(ndim=2, mask=mask)
    if not alpha > 0:
        raise ValueError(f"alpha must be above 0, got {alpha}; 0.05 is the paper's, 1.5 that of single rollouts.")
    return (1 - 1 / (alpha * mask.bool().sum(dim=1))).clamp(min=0)


# Setting → the (B,) λ of the policy's advantages, from the (B, T) mask and the setting's value
LAM_SCHEDULES: dict[str, Callable[[Tensor, float], Tensor]] = {"lam_alpha": length_adaptive_lam}


def choose_lam(
    mask: Tensor, lam: float, lam_value: float | None, schedules: Mapping[str, float | None]
) -> tuple[float | Tensor, float | None]:
    """Choose the lambda of the policy's advantages, and that of the critic's target.

    A schedule with a value replaces lam. The critic's target then uses lam_value, by default 1, so that it does not
    depend on the schedule. Without a schedule, the default of lam_value is lam.

    Args:
        mask: (B, T), 1 = real response token, EOS included.
        lam: in [0, 1].
        lam_value: in [0, 1], or None for the default.
        schedules: a value for each name in `LAM_SCHEDULES`; None for a schedule that is not used.

    Returns:
        The lambda of the advantages, a float or (B,); and that of the target, None if it is the same.

    Raises:
        ValueError: two schedules have a value.
    """
    given = {name: value for name, value in schedules.items() if value is not None}
    if len(given) > 1:
        raise ValueError(f"schedules must name one lambda, got {given}; leave the others out.")
    for name, value in given.items():
        return LAM_SCHEDULES[name](mask, value), 1.0 if lam_value is None else lam_value
    return lam, lam_value


def advantages_and_returns(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float | Tensor,
    lam_value: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Estimate advantages by `gae`, not whitened, and the critic's target, each with a lambda of its own.

    A = gae(lam) and R = V + gae(lam_value). Yuan et al. 2025, arXiv:2503.01491, section 3.3.

    Args:
        rewards: (B, T), score units.
        values: (B, T), score units.
        mask: (B, T), 1 = real response token, EOS included.
        gamma: discount per token.
        lam: of the advantages, a float or (B,).
        lam_value: of the target; None for lam.

    Returns:
        Advantages and returns, (B, T) each, score units.

    Raises:
        ValueError: as `gae`.
    """
    advantages = gae(rewards, values, mask, gamma, lam)
    return advantages, values + (advantages if lam_value is None else gae(rewards, values, mask, gamma, lam_value))


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float | Tensor) -> Tensor:
    """Estimate generalised advantages over the response tokens, not whitened.

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}, with V = A = 0 after the last real token;
    A_t = 0 under the mask. Schulman et al. 2015, arXiv:1506.02438, equation 16. The returns are A + V.

    Args:
        rewards: (B, T), score units; r_t is for choosing token t.
        values: (B, T), score units; V_t is predicted before token t is seen.
        mask: (B, T), 1 = real response token, EOS included. Each row's real tokens come first, without holes.
        gamma: discount per token.
        lam: 0 gives the one-step error, 1 the Monte Carlo return minus the value; or (B,), one for each row.

    Returns:
        (B, T), score units.

    Raises:
        ValueError: rewards is not 2-dimensional, shapes differ, or a row is not right-padded.
    """
    check_shapes(ndim=2, rewards=rewards, values=values, mask=mask)
    if isinstance(lam, Tensor) and lam.shape != rewards.shape[:1]:
        raise ValueError(
            f"lam must be a float or (B,) with the B = {rewards.shape[0]} of rewards, got shape {tuple(lam.shape)}; "
            "give one lambda per sequence."
        )
    mask = mask.bool()
    # A row is right-padded if no real token follows a masked one.
    misplaced = (mask[:, 1:] & ~mask[:, :-1]).any(dim=1)
    if misplaced.any():
        row = int(misplaced.int().argmax())
        raise ValueError(
            f"mask must have each row's real tokens first, without holes, got row {row} = {mask[row].int().tolist()}; "
            "right-pad the responses."
        )
    rewards = torch.where(mask, rewards, 0.0)
    values = torch.where(mask, values, 0.0)
    next_values = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    deltas = rewards + gamma * next_values - values
    advantages = torch.zeros_like(deltas)
    advantage = deltas.new_zeros(deltas.shape[0])
    if isinstance(lam, Tensor):
        lam = lam.to(deltas)
    for t in reversed(range(deltas.shape[1])):
        advantage = deltas[:, t] + gamma * lam * advantage
        advantages[:, t] = advantage
    return advantages
