"""Handle other packages: private names that trl_ext uses, optional packages, and warnings to hide from users."""

from .names import __getattr__
from .packages import is_installed, lazily, need, quiet
