"""Estimate KL(policy || reference), and adapt the coefficient of the KL penalty."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .masking import check_shapes

# Each estimator takes (B, T) log-probs of sampled tokens, nats, and returns (B, T) nats. d = log p(x) - log p_ref(x).
# Schulman 2020, http://joschu.net/blog/kl-approx.html


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return d = logprobs - ref_logprobs, nats, an unbiased estimate of the KL; the arguments may have any shape."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return d^2 / 2 with d = logprobs - ref_logprobs, nats; this estimate of the KL is biased, but never negative."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return exp(-d) - 1 + d with d = logprobs - ref_logprobs, nats.

    This estimate of the KL is unbiased, never negative, and mostly less variable than `k1`.
    """
    log_ratio = logprobs - ref_logprobs
    return torch.expm1(-log_ratio) + log_ratio


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Estimate KL(policy || reference) per token, from tokens that the policy sampled.

    With d = log p(x) - log p_ref(x): k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. Schulman 2020,
    http://joschu.net/blog/kl-approx.html.

    Args:
        logprobs: (B, T), nats, of the sampled tokens under the policy.
        ref_logprobs: (B, T), nats, of the same tokens under the reference.
        kind: a name in `KL_ESTIMATORS`.

    Returns:
        (B, T), nats.
    """
    check_shapes(logprobs=logprobs, ref_logprobs=ref_logprobs)
    return KL_ESTIMATORS[kind](logprobs, ref_logprobs)


def adaptive_kl_coef(
    kl_coef: float,
    kl: float,
    target: float,
    n_episodes: int,
    horizon: float,
    minimum: float = 0.0,
    maximum: float = math.inf,
) -> float:
    """Return the KL coefficient that moves the measured KL towards its target.

    e = clip(KL / target - 1, -0.2, 0.2); coef <- coef (1 + e n / horizon), clamped to [minimum, maximum].
    Ziegler et al. 2019, arXiv:1909.08593, section 2.2, with n / horizon in place of the paper's gain of 0.1. Keep n
    well below 5 horizon: at n = 5 horizon a single step can take the coefficient to 0, where it stays unless
    minimum > 0.

    Args:
        kl_coef: the present coefficient, score units per nat.
        kl: measured KL(policy || reference), summed over a completion, mean over the completions of all ranks, nats.
        target: the wanted KL, in the unit of kl.
        n_episodes: n, episodes of the rollout on all ranks.
        horizon: episodes in which the coefficient moves by about a fifth at most, since |e| <= 0.2.
        minimum: smallest coefficient to return.
        maximum: largest coefficient to return.

    Returns:
        The next coefficient, score units per nat.

    Raises:
        ValueError: kl is NaN or infinite.
    """
    if not math.isfinite(kl):
        raise ValueError(f"kl must be finite, got {kl}; look for NaN or infinity in the log-probs.")
    error = min(max(kl / target - 1, -0.2), 0.2)
    return float(min(max(kl_coef * (1 + error * n_episodes / horizon), minimum), maximum))
