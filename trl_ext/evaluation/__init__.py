"""Measures of reward models on held-out pairs, and of policies against gold; most are functions of tensors."""

from .bootstrap import bootstrap_interval
from .calibration import calibration_error_by_chance, fit_temperature, reliability_bins
from .centring import centre, centring_shift, head_of, write_scores
from .ensemble import ensemble_report
from .overoptimization import fit_overoptimization, overoptimization_curve
from .phrases import mine_phrases
from .probes import probe_reward
from .ranking import best_of_n_credit, best_of_n_report, rank_correlation, ranking_report, rankings_of_pairs
from .reward_model import (
    accuracy_by_group,
    accuracy_by_length_gap,
    accuracy_interval,
    calibration_error,
    length_bias,
    pairwise_accuracy,
    plot_margins,
    reward_model_report,
    wilson_interval,
)

__all__ = [
    "accuracy_by_group",
    "accuracy_by_length_gap",
    "accuracy_interval",
    "best_of_n_credit",
    "best_of_n_report",
    "bootstrap_interval",
    "calibration_error",
    "calibration_error_by_chance",
    "centre",
    "centring_shift",
    "ensemble_report",
    "fit_overoptimization",
    "fit_temperature",
    "head_of",
    "length_bias",
    "mine_phrases",
    "overoptimization_curve",
    "pairwise_accuracy",
    "plot_margins",
    "probe_reward",
    "rank_correlation",
    "ranking_report",
    "rankings_of_pairs",
    "reliability_bins",
    "reward_model_report",
    "wilson_interval",
    "write_scores",
]
