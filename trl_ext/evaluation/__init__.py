"""
Evaluate reward models on held-out pairs and policies by a gold score; find similar texts, and what rewards pay for.
"""

from typing import TYPE_CHECKING

from ..upstream import lazily

if TYPE_CHECKING:
    from .attribution import *
    from .probes import *
    from .reward_model import *
    from .words import *
else:
    __getattr__, __dir__, __all__ = lazily(
        __name__,
        {
            ".attribution": "Attribution Paid Sums features_of reward_attribution",
            ".probes": "mine_phrases probe_reward",
            ".reward_model": """
                accuracy_by_group accuracy_by_length_gap accuracy_interval best_of_n_report bootstrap_interval
                calibration_error calibration_error_by_chance ensemble_report fit_temperature length_bias
                pairwise_accuracy ranking_report reliability_bins reward_model_report wilson_interval""",
            ".words": "Duplicates Unit copied_shares corpus_ngrams find_duplicates main_script normalised words_of",
        },
    )
