"""Handle other packages: private names that trl_ext uses, optional packages, and warnings to hide from users."""

from typing import TYPE_CHECKING

from .lazy import lazily

if TYPE_CHECKING:
    from .names import get_callable_name as get_callable_name, is_conversational as is_conversational
    from .packages import is_installed as is_installed, need as need
    from .terminal import quiet as quiet
else:
    __getattr__, __dir__, __all__ = lazily(__name__, __file__)
