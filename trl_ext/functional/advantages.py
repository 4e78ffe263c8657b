"""Compute token rewards from the scores of completions, and advantages from token rewards."""

import torch
from torch import Tensor

from .masking import check_shapes, last_token_index, turn_numbers, turn_starts


def token_rewards(
    scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float, token_scores: Tensor | None = None
) -> Tensor:
    """Spread the score and the KL penalty over the tokens of each completion.

    On real tokens r_t = -kl_coef kl_t + [t is the last real token] score; under the mask r_t = 0. A row without a real
    token gets no score. Ziegler et al. 2019, arXiv:1909.08593.

    With token scores x_t, r_t = -kl_coef kl_t + x_t before the last real token n, and token n gets the rest of the
    score: r_n = -kl_coef kl_n + score - sum_{t<n} x_t. So x_n is not read, and the row's rewards still sum to
    score - kl_coef sum kl_t.

    Args:
        scores: (B,), score units.
        kl: (B, T), nats, per token.
        mask: (B, T), 1 = real completion token, EOS included.
        kl_coef: score units per nat.
        token_scores: (B, T), score units: the part of the row's score that belongs to each token; None means 0 for
            every token.

    Returns:
        (B, T), score units.
    """
    check_shapes(kl=kl, mask=mask)
    rewards = torch.where(mask.bool(), -kl_coef * kl, 0.0)
    is_last = torch.arange(kl.shape[1], device=kl.device) == last_token_index(mask).unsqueeze(1)
    if token_scores is not None:
        check_shapes(kl=kl, token_scores=token_scores)
        earlier = torch.where(mask.bool() & ~is_last, token_scores, 0.0)
        rewards = rewards + earlier
        scores = scores - earlier.sum(dim=1)
    return rewards + torch.where(is_last, scores.unsqueeze(1), 0.0)


def length_adaptive_lam(mask: Tensor, alpha: float) -> Tensor:
    """Give each completion a lambda that depends on its length: lam = 1 - 1 / (alpha n), and 0 where alpha n <= 1.

    n is the number of 1s in a row of the mask. GAE weights the one-step error k tokens ahead by lam^k. With lam above
    0, these weights sum to at most 1 / (1 - lam) = alpha n. So GAE looks ahead over the share alpha of a completion of
    any length. Yue et al. 2025, arXiv:2504.05118, section 4.2.

    Args:
        mask: (B, T), 1 = token that counts in the completion's length.
        alpha: share of the completion's length, above 0; 0.05 in that paper.

    Returns:
        (B,), float32, each in [0, 1); 0 where n is 0.
    """
    return (1 - 1 / (alpha * mask.bool().sum(dim=1))).clamp(min=0)


def choose_lam(
    mask: Tensor, lam: float, lam_value: float | None, lam_alpha: float | None
) -> tuple[float | Tensor, float | None]:
    """Choose two lambdas: one for the policy's advantages, one for the critic's target.

    - The advantages use [`length_adaptive_lam`] if there is a lam_alpha, else lam.
    - The target uses lam_value. If that is None, the target uses lam, or 1 if there is a lam_alpha.

    Args:
        mask: (B, T), 1 = token that counts in a completion's length.
        lam: in [0, 1].
        lam_value: in [0, 1], or None; see above.
        lam_alpha: share of a completion's length, above 0, or None; see above.

    Returns:
        The lambda of the advantages, a float or (B,); and the lambda of the target, None if it is the same lambda.
    """
    if lam_alpha is None:
        return lam, lam_value
    return length_adaptive_lam(mask, lam_alpha), 1.0 if lam_value is None else lam_value


def advantages_and_returns(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float | Tensor,
    lam_value: float | None = None,
    level: str = "token",
) -> tuple[Tensor, Tensor]:
    """Estimate the advantages A, not whitened, and the returns R, which are the critic's target.

    A = gae(lam) and R = V + gae(lam_value). Yuan et al. 2025, arXiv:2503.01491, section 3.3.

    Args:
        rewards: (B, T), score units.
        values: (B, T), score units.
        mask: (B, T), 1 = token that the policy sampled, EOS included.
        gamma: discount per token; per turn with the level `"turn"`.
        lam: lambda of the advantages, a float or (B,).
        lam_value: lambda of the target; None takes lam.
        level: `"token"` uses `gae`; `"turn"` uses `turn_gae`, which gives all tokens of a turn the same advantage and
            return.

    Returns:
        Advantages and returns, (B, T) each, score units.
    """
    if level == "turn":
        advantages, firsts = turn_gae(rewards, values, mask, gamma, lam)
        return advantages, firsts + (
            advantages if lam_value is None else turn_gae(rewards, values, mask, gamma, lam_value)[0]
        )
    advantages = gae(rewards, values, mask, gamma, lam)
    if lam_value is None:
        return advantages, values + advantages
    return advantages, values + gae(rewards, values, mask, gamma, lam_value)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float | Tensor) -> Tensor:
    """Estimate generalised advantages over the completion tokens, not whitened.

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}, with V = A = 0 after the last real token;
    A_t = 0 under the mask. Schulman et al. 2015, arXiv:1506.02438, equation 16. The returns are A + V.

    Tokens under the mask do not count as steps: t + 1 is the next real token. A turn is an unbroken run of 1s in the
    mask. So V_{t+1} of a turn's last token is the value at the next turn's first token, predicted after the critic has
    read the environment's text in between.

    Args:
        rewards: (B, T), score units; r_t is for choosing token t.
        values: (B, T), score units; V_t is predicted before token t is seen.
        mask: (B, T), 1 = token that the policy sampled, EOS included. It may be 0 within a row, and at either end.
        gamma: discount per token.
        lam: a float, or (B,) with one for each row; 0 gives the one-step error, 1 the Monte Carlo return minus the
            value.

    Returns:
        (B, T), score units.
    """
    check_shapes(rewards=rewards, values=values, mask=mask)
    mask = mask.bool()
    order = (~mask).byte().argsort(dim=1, stable=True)  # the real tokens first
    rewards, values = (torch.where(mask, x, 0.0).gather(1, order) for x in (rewards, values))
    after_last = torch.zeros_like(values[:, :1])
    next_values = torch.cat([values[:, 1:], after_last], dim=1)
    deltas = rewards + gamma * next_values - values
    advantages = torch.zeros_like(deltas)
    advantage = deltas.new_zeros(deltas.shape[0])
    if isinstance(lam, Tensor):
        lam = lam.to(deltas)
    for t in reversed(range(deltas.shape[1])):
        advantage = deltas[:, t] + gamma * lam * advantage
        advantages[:, t] = advantage
    return torch.zeros_like(advantages).scatter(1, order, advantages)


def turn_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Estimate advantages with each turn as one action (Turn-PPO, arXiv:2512.17008).

    A turn is an unbroken run of tokens that the policy sampled (1 in `mask`). [`gae`] runs over the turns, with the
    sum of turn k's rewards as r_k, and the value at turn k's first token as V_k. So gamma and lam are per turn. All
    tokens of a turn get the turn's advantage.

    Args:
        rewards, values: (B, T), score units, as in [`gae`].
        mask: (B, T), 1 = token that the policy sampled, EOS included; 0 between turns and at padding.
        gamma: discount per turn.
        lam: a float, or (B,) with one for each row.

    Returns:
        The advantages, and at each token of turn k the value V_k, (B, T) each, score units, 0 under the mask. Their
        sum is the returns.
    """
    check_shapes(rewards=rewards, values=values, mask=mask)
    turns = turn_numbers(mask)
    starts = turn_starts(mask)
    mask = mask.bool()
    sums = torch.zeros_like(rewards).scatter_add(1, turns, torch.where(mask, rewards, 0.0))
    firsts = torch.zeros_like(values).scatter_add(1, turns, torch.where(starts, values, 0.0))
    is_turn = torch.arange(mask.shape[1], device=mask.device) < starts.sum(dim=1, keepdim=True)
    advantages = gae(sums, firsts, is_turn, gamma, lam)
    advantages = torch.where(mask, advantages.gather(1, turns), 0.0)
    firsts = torch.where(mask, firsts.gather(1, turns), 0.0)
    return advantages, firsts
