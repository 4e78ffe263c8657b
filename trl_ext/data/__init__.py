"""Loading data sets, and looking at what is in them before a model is loaded."""

from .hh import split_dialogue, split_pair
from .identity import rows_identity
from .loading import held_out_rows, load_dataset_split
from .pairs import usable_pairs
from .texts import check_chat_template, check_texts, has_content, is_text

__all__ = [
    "check_chat_template",
    "check_texts",
    "has_content",
    "held_out_rows",
    "is_text",
    "load_dataset_split",
    "rows_identity",
    "split_dialogue",
    "split_pair",
    "usable_pairs",
]
