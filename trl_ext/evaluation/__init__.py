"""Measure reward models on held-out pairs, policies against a gold score, and how alike texts are."""

from typing import TYPE_CHECKING

from ..upstream.lazy import lazily

if TYPE_CHECKING:
    from .intervals import accuracy_interval as accuracy_interval
    from .intervals import bootstrap_interval as bootstrap_interval
    from .intervals import pairwise_accuracy as pairwise_accuracy
    from .intervals import wilson_interval as wilson_interval
    from .phrases import mine_phrases as mine_phrases
    from .probes import probe_reward as probe_reward
    from .reward_model import accuracy_by_group as accuracy_by_group
    from .reward_model import accuracy_by_length_gap as accuracy_by_length_gap
    from .reward_model import best_of_n_report as best_of_n_report
    from .reward_model import calibration_error as calibration_error
    from .reward_model import calibration_error_by_chance as calibration_error_by_chance
    from .reward_model import ensemble_report as ensemble_report
    from .reward_model import fit_overoptimization as fit_overoptimization
    from .reward_model import fit_temperature as fit_temperature
    from .reward_model import length_bias as length_bias
    from .reward_model import overoptimization_curve as overoptimization_curve
    from .reward_model import plot_margins as plot_margins
    from .reward_model import ranking_report as ranking_report
    from .reward_model import reliability_bins as reliability_bins
    from .reward_model import reward_model_report as reward_model_report
    from .texts import Duplicates as Duplicates
    from .texts import Unit as Unit
    from .texts import copied_shares as copied_shares
    from .texts import corpus_ngrams as corpus_ngrams
    from .texts import find_duplicates as find_duplicates
    from .texts import main_script as main_script
    from .texts import normalised as normalised
    from .texts import words_of as words_of
else:
    __getattr__, __dir__, __all__ = lazily(__name__, __file__)
