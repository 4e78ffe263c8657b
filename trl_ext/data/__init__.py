"""Loading data sets, and looking at what is in them before a model is loaded."""

from .copies import copied_shares, corpus_ngrams
from .duplicates import Duplicates, find_duplicates, normalised, similarity_of
from .filtering import REASONS, balance, divide, left_out, strata
from .hh import split_dialogue, split_pair
from .identity import rows_identity
from .labelling import (
    LABEL_STUDIO_CONFIG,
    answer_key,
    answers_to_label,
    argilla_records,
    as_text,
    label_studio_tasks,
    read_choices,
)
from .loading import held_out_rows, load_dataset_split
from .pairs import usable_pairs
from .prompts import PromptReport, PromptSet, examine_prompts
from .scripts import SCRIPTS, main_scripts
from .shingles import count_words, in_parts, ngram_hashes
from .splits import balanced_rows, split_groups
from .texts import check_chat_template, check_texts, has_content, is_text
from .trained import TrainedPairs, not_trained_on, pair_hashes

__all__ = [
    "LABEL_STUDIO_CONFIG",
    "PromptReport",
    "PromptSet",
    "TrainedPairs",
    "REASONS",
    "SCRIPTS",
    "Duplicates",
    "answer_key",
    "answers_to_label",
    "argilla_records",
    "as_text",
    "balance",
    "balanced_rows",
    "check_chat_template",
    "check_texts",
    "copied_shares",
    "corpus_ngrams",
    "count_words",
    "divide",
    "examine_prompts",
    "find_duplicates",
    "has_content",
    "held_out_rows",
    "in_parts",
    "is_text",
    "label_studio_tasks",
    "left_out",
    "load_dataset_split",
    "main_scripts",
    "ngram_hashes",
    "normalised",
    "not_trained_on",
    "pair_hashes",
    "read_choices",
    "rows_identity",
    "similarity_of",
    "split_dialogue",
    "split_groups",
    "split_pair",
    "strata",
    "usable_pairs",
]
