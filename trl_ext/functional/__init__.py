"""Pure tensor maths of PPO: no model, no config, no trainer, no dependency but torch."""

from .advantages import gae, token_rewards
from .kl import adaptive_kl_coef, kl_estimate
from .losses import approx_kl, policy_loss, value_loss
from .masking import last_token_index, masked_mean, masked_sum, position_ids
from .moments import (
    empty_moments,
    explained_variance,
    merge_moments,
    moments,
    standard_deviation,
    variance,
    whiten,
)

__all__ = [
    "adaptive_kl_coef",
    "approx_kl",
    "empty_moments",
    "explained_variance",
    "gae",
    "kl_estimate",
    "last_token_index",
    "masked_mean",
    "masked_sum",
    "merge_moments",
    "moments",
    "policy_loss",
    "position_ids",
    "standard_deviation",
    "token_rewards",
    "value_loss",
    "variance",
    "whiten",
]
