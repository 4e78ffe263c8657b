"""Report on prompt sets, on a reward model, and on policies' answers to held-out prompts."""

from typing import TYPE_CHECKING

from ...upstream.lazy import lazily

if TYPE_CHECKING:
    from .prompt_sets import REASONS as REASONS
    from .prompt_sets import PromptReport as PromptReport
    from .prompt_sets import PromptSet as PromptSet
    from .prompt_sets import divide as divide
    from .prompt_sets import examine_prompts as examine_prompts
    from .prompt_sets import left_out as left_out
    from .prompt_sets import strata as strata
else:
    __getattr__, __dir__, __all__ = lazily(__name__, __file__)
