"""Manage runs: write and resume checkpoints, lock output folders, keep stopped runs stopped, and check settings."""

from typing import TYPE_CHECKING

from ..upstream import lazily

if TYPE_CHECKING:
    from ..upstream.statements import refuse as refuse
    from .checkpoints import *
    from .control import *
    from .files import *
    from .output_dir import *
    from .package_files import *
    from .redaction import *
    from .saving import *
    from .settings import *
else:
    __getattr__, __dir__, __all__ = lazily(
        __name__,
        {
            "..upstream.statements": "refuse",
            ".checkpoints": "checkpoint_to_resume differences fingerprint",
            ".control": "CannotResume",
            ".files": """
                PRIVATE_FOLDER REGISTRY RUNBOOK finite from_first is_finite_number on_first read_jsonl whole_file
                write_text""",
            ".output_dir": "FolderInUse Hold check_output_dir overlap",
            ".package_files": "accelerate_file config_file did_you_mean find recipe root",
            ".redaction": "redacted",
            ".saving": "NotSaved last_evaluation save_trained",
            ".settings": "check_settings setting",
        },
    )
