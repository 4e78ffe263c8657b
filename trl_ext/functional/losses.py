"""Compute PPO's losses for each token, and the importance weights of tokens that another policy sampled.

Average the losses by their `masked_sum` and the global token count. They take no mask, so masked positions need finite
inputs (fill log-probs with 0, say). `masked_sum` sends a zero gradient to masked positions; the ratio multiplies that
gradient, and 0 * inf would be NaN.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from .masking import check_shapes
from .statistics import variance

LARGEST_LOG_RATIO = 20.0  # nats, as in TRL and verl: e^20 is far beyond any useful bound of a ratio; float32 holds it


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    cliprange_low: float,
    cliprange_high: float,
    dual_clip: float | None = None,
    band: tuple[float, float] | list[float] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute PPO's clipped surrogate loss per token; with a `band`, only tokens with a ratio in the band have a loss.

    With r = exp(min(logp - logp_old, 20)): loss = -min(r A, clip(r, 1 - low, 1 + high) A), Schulman et al. 2017,
    arXiv:1707.06347, equation 7. With a dual clip c, loss <- min(loss, -c A) where A < 0, Ye et al. 2019,
    arXiv:1912.09729.

    With a band [l, h] nothing is clipped: loss = -r A where l <= r <= h, and 0 elsewhere, whatever the sign of A. A
    token outside the band has no gradient; a token inside has the gradient of -r A logp with r held constant. GLM-5
    team 2026, arXiv:2602.15763 (there, logp_old is the sampler's), and Hou et al. 2026, arXiv:2607.07508.

    Args:
        logprobs: (B, T), nats, under the policy being trained.
        old_logprobs: (B, T), nats, under the policy that sampled.
        advantages: (B, T), score units, or dimensionless when whitened.
        cliprange_low: how far the ratio may fall below 1.
        cliprange_high: how far the ratio may rise above 1.
        dual_clip: c, above 1; None turns the dual clip off.
        band: l and h, the lowest and highest ratio, both included; with a band cliprange_low, cliprange_high and
            dual_clip are ignored. None for no band.

    Returns:
        The loss (B, T), in the unit of advantages; and a bool mask (B, T), True for the tokens whose clipped loss is
        strictly larger than the unclipped one, as in TRL 1.12, dual clip aside. With a band, the mask is True for the
        tokens outside the band.
    """
    check_shapes(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    log_ratio = logprobs - old_logprobs
    if band is not None:
        ratio = torch.exp(log_ratio.detach())
        is_inside = (band[0] <= ratio) & (ratio <= band[1])
        # A ratio that overflows is left out before exp, too
        kept = torch.exp(torch.where(is_inside, log_ratio, 0.0))
        return torch.where(is_inside, -kept * advantages, 0.0), ~is_inside
    ratio = torch.exp(log_ratio.clamp(max=LARGEST_LOG_RATIO))  # 0 times an infinite derivative would be NaN
    unclipped_loss = -ratio * advantages
    clipped_loss = -ratio.clamp(1 - cliprange_low, 1 + cliprange_high) * advantages
    loss = torch.maximum(unclipped_loss, clipped_loss)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    return loss, clipped_loss > unclipped_loss


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, cliprange_value: float | None = None
) -> tuple[Tensor, Tensor]:
    """Compute half the critic's squared error per token, with values clipped to within c of the rollout's values.

    loss = max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / 2, or without c (v - R)^2 / 2. arXiv:2403.17031.

    Args:
        values: (B, T), v, score units, of the critic being trained.
        old_values: (B, T), v_old, score units, of the critic at the rollout.
        returns: (B, T), R, score units.
        cliprange_value: c, score units; None turns clipping off.

    Returns:
        The loss (B, T), squared score units; and a bool mask (B, T), True for the tokens whose clipped loss is larger
        than the unclipped one.
    """
    check_shapes(values=values, old_values=old_values, returns=returns)
    loss = 0.5 * (values - returns).square()
    if cliprange_value is None:
        return loss, torch.zeros_like(loss, dtype=torch.bool)
    clipped_values = torch.clamp(values, old_values - cliprange_value, old_values + cliprange_value)
    clipped_loss = 0.5 * (clipped_values - returns).square()
    return torch.maximum(loss, clipped_loss), clipped_loss > loss


def importance_weights(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
    clip_min: float | None = None,
    clip_max: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute importance weights, within bounds, for tokens that a policy mu sampled while a policy pi is trained.

    With d_t = log pi(y_t) - log mu(y_t), the first word of the mode says what is weighted, the second what happens to
    a weight outside [clip_min, clip_max]. The modes have the names of TRL's GRPO.

    - "token": each token, by w_t = exp(min(d_t, 20)).
    - "sequence": the whole completion, by w = exp(min(sum_t d_t, 20)).
    - "truncate": it becomes the nearer bound (truncated importance sampling, Ionides 2008; for tokens Yao et al. 2025,
      https://fengyao.notion.site/off-policy-rl).
    - "mask": it becomes 0 (for tokens IcePop, Ring-1T, arXiv:2510.18855).

    Without bounds, the weights of whole completions are unbiased, and their variance grows exponentially with the
    length; the weights of tokens are unbiased only for completions of a single token, since each weight ignores that
    mu sampled the completion's other tokens, too. Bounds add bias and reduce variance. No weight makes up for tokens
    that mu never samples.

    Args:
        logprobs: (B, T), nats, under pi, the policy to be trained; may be -inf.
        sampler_logprobs: (B, T), nats, under mu, the distribution that was sampled from, after temperature and
            truncation.
        mask: (B, T), 1 = real token. Where the mask is 0, the log-probs may be anything.
        mode: what is weighted, and what happens to weights outside the bounds; see above.
        clip_min: lower bound, at most 1; None for no bound.
        clip_max: upper bound, at least 1; None for no bound.

    Returns:
        The weights, without gradient, float32 or wider: (B, T) for tokens, with 1 where the mask is 0, or (B, 1) for
        whole completions; and a bool mask of the same shape, True for the weights that a bound changed.

    Raises:
        ValueError: sampler_logprobs are NaN or infinite at a real token.
    """
    check_shapes(logprobs=logprobs, sampler_logprobs=sampler_logprobs, mask=mask)
    level, _, rule = mode.partition("_")
    lowest = clip_min if clip_min is not None else 0.0
    highest = clip_max if clip_max is not None else math.inf
    mask = mask.bool()
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    new, sampler = (x.detach().to(dtype).masked_fill(~mask, 0.0) for x in (logprobs, sampler_logprobs))
    if not sampler.isfinite().all():
        raise ValueError(
            f"sampler_logprobs must be finite at real tokens, got {sampler[~sampler.isfinite()][0].item()}; mask out "
            "tokens that the sampler cannot have sampled."
        )
    log_ratio = new - sampler
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True)
    ratio = log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()
    is_outside = (ratio < lowest) | (ratio > highest)
    if rule == "truncate":
        return ratio.clamp(lowest, highest), is_outside
    return ratio.masked_fill(is_outside, 0.0), is_outside


def effective_sample_size(moments: Tensor) -> Tensor:
    """Return the effective sample size of N samples with weights w, as a share of N.

    The share is (sum w)^2 / (N sum w^2) = mean^2 / (mean^2 + var), with the biased variance; Kong 1992, and Owen,
    Monte Carlo theory, methods and examples, section 9.3. It is 1 if all weights are equal, and 1/N if one sample has
    all the weight.

    Args:
        moments: (..., 5) moments of the weights, as [`moments`] computes them.

    Returns:
        (...), dimensionless, 0 to 1; 0 where every weight is 0.
    """
    spread = variance(moments, unbiased=False)
    square = moments[..., 1].square()
    return torch.where(square == 0, 0.0, square / (square + spread))
