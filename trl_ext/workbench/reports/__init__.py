"""Report on prompt sets, on a reward model, and on policies' answers to held-out prompts."""

from typing import TYPE_CHECKING

from ...upstream.lazy import lazily

if TYPE_CHECKING:
    from .prompt_sets import (
        REASONS as REASONS,
        PromptReport as PromptReport,
        PromptSet as PromptSet,
        divide as divide,
        examine_prompts as examine_prompts,
        left_out as left_out,
        strata as strata,
    )
else:
    __getattr__, __dir__, __all__ = lazily(__name__, __file__)
