"""Load datasets, split them, and check their rows before a model is loaded."""

from typing import TYPE_CHECKING

from ..upstream.lazy import lazily

if TYPE_CHECKING:
    from .loading import (
        held_out_rows as held_out_rows,
        load_dataset_split as load_dataset_split,
        write_rows as write_rows,
    )
    from .pairs import usable_pairs as usable_pairs
    from .splits import (
        hold_out_prompts as hold_out_prompts,
        prompt_groups as prompt_groups,
        split_groups as split_groups,
    )
    from .texts import (
        answers_alone as answers_alone,
        check_texts as check_texts,
        content_of as content_of,
        has_content as has_content,
        is_messages as is_messages,
        is_text as is_text,
        one_form as one_form,
        tool_calls as tool_calls,
    )
    from .trained import (
        TrainedPairs as TrainedPairs,
        first_prompts as first_prompts,
        hashes_of_answers as hashes_of_answers,
        load_trained_prompts as load_trained_prompts,
        not_trained_on as not_trained_on,
        pair_hashes as pair_hashes,
        prompt_hashes as prompt_hashes,
        save_prompt_hashes as save_prompt_hashes,
        save_trained_prompts as save_trained_prompts,
    )
else:
    __getattr__, __dir__, __all__ = lazily(__name__, __file__)
