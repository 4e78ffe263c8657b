"""Measure reward models on held-out pairs, policies against a gold score, and how alike texts are."""

from typing import TYPE_CHECKING

from ..upstream.lazy import lazily

if TYPE_CHECKING:
    from .bootstrap import bootstrap_interval as bootstrap_interval
    from .calibration import calibration_error_by_chance as calibration_error_by_chance
    from .calibration import fit_temperature as fit_temperature
    from .calibration import reliability_bins as reliability_bins
    from .copies import copied_shares as copied_shares
    from .copies import corpus_ngrams as corpus_ngrams
    from .duplicates import Duplicates as Duplicates
    from .duplicates import find_duplicates as find_duplicates
    from .duplicates import normalised as normalised
    from .duplicates import similarity_of as similarity_of
    from .ensemble import ensemble_report as ensemble_report
    from .overoptimization import fit_overoptimization as fit_overoptimization
    from .overoptimization import overoptimization_curve as overoptimization_curve
    from .phrases import mine_phrases as mine_phrases
    from .probes import probe_reward as probe_reward
    from .ranking import best_of_n_credit as best_of_n_credit
    from .ranking import best_of_n_report as best_of_n_report
    from .ranking import rank_correlation as rank_correlation
    from .ranking import ranking_report as ranking_report
    from .ranking import rankings_of_pairs as rankings_of_pairs
    from .reward_model import accuracy_by_group as accuracy_by_group
    from .reward_model import accuracy_by_length_gap as accuracy_by_length_gap
    from .reward_model import accuracy_interval as accuracy_interval
    from .reward_model import calibration_error as calibration_error
    from .reward_model import length_bias as length_bias
    from .reward_model import pairwise_accuracy as pairwise_accuracy
    from .reward_model import plot_margins as plot_margins
    from .reward_model import reward_model_report as reward_model_report
    from .reward_model import wilson_interval as wilson_interval
    from .scripts import SCRIPTS as SCRIPTS
    from .scripts import main_scripts as main_scripts
    from .shingles import Unit as Unit
    from .shingles import count_words as count_words
    from .shingles import in_parts as in_parts
    from .shingles import ngram_hashes as ngram_hashes
else:
    __getattr__, __dir__, __all__ = lazily(__name__, __file__)
