"""Measures of reward models on held-out pairs, and of policies against gold; most are functions of tensors."""

from .bootstrap import bootstrap_interval
from .centring import centre_and_report, centring_shift, head_of
from .ensemble import ensemble_report
from .overoptimization import fit_overoptimization, overoptimization_curve
from .phrases import mine_phrases
from .probes import probe_reward
from .reward_model import (
    accuracy_by_length_gap,
    calibration_error,
    pairwise_accuracy,
    plot_margins,
    reward_model_report,
)

__all__ = [
    "accuracy_by_length_gap",
    "bootstrap_interval",
    "calibration_error",
    "centre_and_report",
    "centring_shift",
    "ensemble_report",
    "fit_overoptimization",
    "head_of",
    "mine_phrases",
    "overoptimization_curve",
    "pairwise_accuracy",
    "plot_margins",
    "probe_reward",
    "reward_model_report",
]
