"""Load datasets, split them, and check their rows before a model is loaded."""

from typing import TYPE_CHECKING

from ..upstream.lazy import lazily

if TYPE_CHECKING:
    from .loading import held_out_rows as held_out_rows
    from .loading import load_dataset_split as load_dataset_split
    from .loading import write_rows as write_rows
    from .pairs import usable_pairs as usable_pairs
    from .splits import hold_out_prompts as hold_out_prompts
    from .splits import prompt_groups as prompt_groups
    from .splits import split_groups as split_groups
    from .texts import answers_alone as answers_alone
    from .texts import check_texts as check_texts
    from .texts import content_of as content_of
    from .texts import has_content as has_content
    from .texts import is_messages as is_messages
    from .texts import is_text as is_text
    from .texts import one_form as one_form
    from .texts import tool_calls as tool_calls
    from .trained import TrainedPairs as TrainedPairs
    from .trained import first_prompts as first_prompts
    from .trained import hashes_of_answers as hashes_of_answers
    from .trained import load_trained_prompts as load_trained_prompts
    from .trained import not_trained_on as not_trained_on
    from .trained import pair_hashes as pair_hashes
    from .trained import prompt_hashes as prompt_hashes
    from .trained import save_prompt_hashes as save_prompt_hashes
    from .trained import save_trained_prompts as save_trained_prompts
else:
    __getattr__, __dir__, __all__ = lazily(__name__, __file__)
