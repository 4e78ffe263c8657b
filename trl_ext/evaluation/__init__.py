"""
Evaluate reward models on held-out pairs and policies by a gold score; find similar texts, and what rewards pay for.
"""

from typing import TYPE_CHECKING

from ..upstream.lazy import lazily

if TYPE_CHECKING:
    from .attribution import (
        Attribution as Attribution,
        Paid as Paid,
        Sums as Sums,
        features_of as features_of,
        reward_attribution as reward_attribution,
    )
    from .probes import mine_phrases as mine_phrases, probe_reward as probe_reward
    from .reward_model import (
        accuracy_by_group as accuracy_by_group,
        accuracy_by_length_gap as accuracy_by_length_gap,
        accuracy_interval as accuracy_interval,
        best_of_n_report as best_of_n_report,
        bootstrap_interval as bootstrap_interval,
        calibration_error as calibration_error,
        calibration_error_by_chance as calibration_error_by_chance,
        ensemble_report as ensemble_report,
        fit_temperature as fit_temperature,
        length_bias as length_bias,
        pairwise_accuracy as pairwise_accuracy,
        ranking_report as ranking_report,
        reliability_bins as reliability_bins,
        reward_model_report as reward_model_report,
        wilson_interval as wilson_interval,
    )
    from .texts import (
        Duplicates as Duplicates,
        Unit as Unit,
        copied_shares as copied_shares,
        corpus_ngrams as corpus_ngrams,
        find_duplicates as find_duplicates,
        main_script as main_script,
        normalised as normalised,
        words_of as words_of,
    )

    __all__: list[str]
else:
    __getattr__, __dir__, __all__ = lazily(__name__, __file__)
