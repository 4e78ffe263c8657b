"""Compute the formulas of PPO, of DPO and of their monitors: pure functions of torch and scipy."""

from .advantages import (
    LAM_SCHEDULES,
    advantages_and_returns,
    choose_lam,
    gae,
    length_adaptive_lam,
    token_rewards,
    turn_gae,
)
from .baselines import critic_products, critic_weight, mean_baselines
from .dpo import (
    displaced,
    margin_scales,
    preference_drift,
    preference_logits,
    preference_loss,
    sequence_logprobs,
)
from .ensemble import disagreement, ensemble_score
from .importance import effective_sample_size, importance_weights
from .kl import KL_ESTIMATORS, adaptive_kl_coef, kl_estimate, learning_rate_factor, step_kl_sums
from .logprobs import logprobs_and_entropies
from .losses import approx_kl, policy_loss, value_loss
from .masking import last_token_index, masked_mean, masked_sum, position_ids, turn_numbers, turn_starts, turn_sums
from .moments import (
    empty_moments,
    explained_variance,
    merge_moments,
    moments,
    standard_deviation,
    variance,
    whiten,
    whitening_scale,
)
from .significance import scatter, share_error, spent_level, student_quantile, unexplained_error

__all__ = [
    "KL_ESTIMATORS",
    "LAM_SCHEDULES",
    "adaptive_kl_coef",
    "advantages_and_returns",
    "approx_kl",
    "choose_lam",
    "critic_products",
    "critic_weight",
    "disagreement",
    "displaced",
    "effective_sample_size",
    "empty_moments",
    "ensemble_score",
    "explained_variance",
    "gae",
    "importance_weights",
    "kl_estimate",
    "last_token_index",
    "length_adaptive_lam",
    "logprobs_and_entropies",
    "margin_scales",
    "masked_mean",
    "masked_sum",
    "mean_baselines",
    "merge_moments",
    "moments",
    "policy_loss",
    "position_ids",
    "preference_drift",
    "preference_logits",
    "preference_loss",
    "learning_rate_factor",
    "scatter",
    "sequence_logprobs",
    "share_error",
    "spent_level",
    "standard_deviation",
    "step_kl_sums",
    "student_quantile",
    "token_rewards",
    "turn_gae",
    "turn_numbers",
    "turn_starts",
    "turn_sums",
    "unexplained_error",
    "value_loss",
    "variance",
    "whiten",
    "whitening_scale",
]
