"""Weigh tokens that another policy has sampled, and measure how many samples are lost by unequal weights."""

import math
from typing import Literal

import torch
from torch import Tensor

from .losses import LARGEST_LOG_RATIO
from .moments import variance
from .shapes import check_shapes


def importance_weights(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
    clip_min: float | None = None,
    clip_max: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute importance weights, within bounds, for tokens that a policy mu sampled while a policy pi is trained.

    With d_t = log pi(y_t) - log mu(y_t): w_t = exp(d_t) of each token, or w = exp(sum_t d_t) of the whole response.
    "truncate" clamps w to [clip_min, clip_max] (truncated importance sampling, Ionides 2008; for tokens Yao et al.
    2025, https://fengyao.notion.site/off-policy-rl). "mask" sets w to 0 outside of it and leaves it alone inside
    (IcePop, Ring-1T, arXiv:2510.18855, for tokens). The modes have the names of TRL's GRPO.

    Weights of whole responses without bounds are unbiased, and their variance grows exponentially with the length.
    Weights of tokens are unbiased for answers of one token alone: they ignore that mu drew the other tokens, too.
    Bounds add bias and take away variance. No weight makes up for tokens that the sampler never draws.

    Args:
        logprobs: (B, T), nats, under the policy to be trained; -inf gives weight 0.
        sampler_logprobs: (B, T), nats, under the distribution that was drawn from, after temperature and truncation.
        mask: (B, T), 1 = real token. Values under a 0 may be anything.
        mode: the ratio of tokens or of whole responses, and what happens to it outside the bounds.
        clip_min: lower bound, None for none.
        clip_max: upper bound, None for none.

    Returns:
        The weights, without gradient, (B, T) or for whole responses (B, 1), float32 or wider, 1 where the mask is 0;
        and a mask of the same shape, bool, of those that a bound changed.

    Raises:
        ValueError: shapes differ, mode has another value, clip_min >= clip_max, or the sampler's log-prob of a real
            token is not finite.
    """
    check_shapes(logprobs=logprobs, sampler_logprobs=sampler_logprobs, mask=mask)
    level, _, rule = mode.partition("_")
    if level not in ("token", "sequence") or rule not in ("truncate", "mask"):
        raise ValueError(
            f"mode must be 'token_truncate', 'token_mask', 'sequence_truncate' or 'sequence_mask', got {mode!r}; "
            "'token_truncate' is usual."
        )
    lowest, highest = clip_min if clip_min is not None else 0.0, clip_max if clip_max is not None else math.inf
    if not lowest < highest:
        raise ValueError(f"clip_min must be below clip_max, got {clip_min} >= {clip_max}; 0.5 and 3.0, say.")
    mask = mask.bool()
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    new, drawn = (x.detach().to(dtype).masked_fill(~mask, 0.0) for x in (logprobs, sampler_logprobs))
    if not drawn.isfinite().all():
        raise ValueError(
            f"sampler_logprobs must be finite at real tokens, got {drawn[~drawn.isfinite()][0].item()}: a token that "
            "could not be drawn has no weight; leave it out by the mask."
        )
    log_ratio = new - drawn
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True)
    ratio = log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()
    is_outside = (ratio < lowest) | (ratio > highest)
    if rule == "truncate":
        return ratio.clamp(lowest, highest), is_outside
    return ratio.masked_fill(is_outside, 0.0), is_outside


def effective_sample_size(moments: Tensor) -> Tensor:
    """Return how many samples with equal weights are worth as much as N samples with weights w, as a share of N.

    (sum w)^2 / (N sum w^2) = mean^2 / (mean^2 + var), with the biased variance; Kong 1992, and Owen, Monte Carlo
    theory, methods and examples, section 9.3. 1 with equal weights, 1/N where one draw has all the weight.

    Args:
        moments: (..., 5) moments of the weights.

    Returns:
        (...), dimensionless, 0 to 1; 0 where every weight is 0.

    Raises:
        ValueError: the last dimension is not 5.
    """
    spread = variance(moments, unbiased=False)
    square = moments[..., 1].square()
    return torch.where(square == 0, 0.0, square / (square + spread))
