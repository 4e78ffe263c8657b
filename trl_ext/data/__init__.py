"""Load datasets, split them, and check their rows before a model is loaded."""

from typing import TYPE_CHECKING

from ..upstream import lazily

if TYPE_CHECKING:
    from .messages import *
    from .pairs import *
    from .splits import *
    from .trained import *
else:
    __getattr__, __dir__, __all__ = lazily(
        __name__,
        {
            ".messages": "answers_alone check_texts content_of has_content is_messages is_text one_form tool_calls",
            ".pairs": "usable_pairs",
            ".splits": "held_out_rows hold_out_prompts load_dataset_split prompt_groups split_groups write_rows",
            ".trained": """
                TrainedPairs first_prompts hashes_of_answers load_trained_prompts not_trained_on pair_hashes
                prompt_hashes save_prompt_hashes save_trained_prompts""",
        },
    )
