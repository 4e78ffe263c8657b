"""Report on the prompts of data sets, and write copies without duplicates and without rows of held-out sets."""

from typing import TYPE_CHECKING

from ...upstream.lazy import lazily

if TYPE_CHECKING:
    from .examine import REASONS as REASONS
    from .examine import PromptReport as PromptReport
    from .examine import PromptSet as PromptSet
    from .examine import balance as balance
    from .examine import divide as divide
    from .examine import examine_prompts as examine_prompts
    from .examine import left_out as left_out
    from .examine import strata as strata
else:
    __getattr__, __dir__, __all__ = lazily(__name__, __file__)
