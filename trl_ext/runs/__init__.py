"""Manage runs: write and resume checkpoints, lock output folders, keep stopped runs stopped, and check settings."""

from typing import TYPE_CHECKING

from ..upstream.lazy import lazily

if TYPE_CHECKING:
    from .checkpoints import CannotResume as CannotResume
    from .checkpoints import NotSaved as NotSaved
    from .checkpoints import checkpoint_to_resume as checkpoint_to_resume
    from .checkpoints import differences as differences
    from .checkpoints import fingerprint as fingerprint
    from .checkpoints import save_trained as save_trained
    from .files import PRIVATE_FOLDER as PRIVATE_FOLDER
    from .files import REGISTRY as REGISTRY
    from .files import RUNBOOK as RUNBOOK
    from .files import from_first as from_first
    from .files import is_finite_number as is_finite_number
    from .files import is_notice as is_notice
    from .files import on_first as on_first
    from .files import read_jsonl as read_jsonl
    from .files import whole_file as whole_file
    from .files import without_nan as without_nan
    from .files import write_text as write_text
    from .output_dir import FolderInUse as FolderInUse
    from .output_dir import Hold as Hold
    from .output_dir import check_output_dir as check_output_dir
    from .output_dir import last_evaluation as last_evaluation
    from .output_dir import overlap as overlap
    from .redaction import redacted as redacted
    from .settings import check_settings as check_settings
    from .settings import setting as setting
    from .shipped import accelerate_file as accelerate_file
    from .shipped import config_file as config_file
    from .shipped import did_you_mean as did_you_mean
    from .shipped import find as find
    from .shipped import recipe as recipe
    from .shipped import root as root
else:
    __getattr__, __dir__, __all__ = lazily(__name__, __file__)
