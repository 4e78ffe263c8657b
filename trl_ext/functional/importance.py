"""Compute importance weights for tokens that another policy sampled, and the effective sample size of weights."""

import math
from typing import Literal

import torch
from torch import Tensor

from .losses import LARGEST_LOG_RATIO
from .masking import check_shapes
from .moments import variance


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
    length; the weights of tokens are unbiased only for answers of a single token, since each weight ignores that mu
    sampled the answer's other tokens, too. Bounds add bias and reduce variance. No weight makes up for tokens that mu
    never samples.

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
