"""Manage runs: write and resume checkpoints, lock output folders, keep stopped runs stopped, and check settings."""

from typing import TYPE_CHECKING

from ..upstream.lazy import lazily

if TYPE_CHECKING:
    from .checkpoints import (
        CannotResume as CannotResume,
        NotSaved as NotSaved,
        checkpoint_to_resume as checkpoint_to_resume,
        differences as differences,
        fingerprint as fingerprint,
        save_trained as save_trained,
    )
    from .files import (
        PRIVATE_FOLDER as PRIVATE_FOLDER,
        REGISTRY as REGISTRY,
        RUNBOOK as RUNBOOK,
        from_first as from_first,
        is_finite_number as is_finite_number,
        on_first as on_first,
        read_jsonl as read_jsonl,
        whole_file as whole_file,
        without_nan as without_nan,
        write_text as write_text,
    )
    from .output_dir import (
        FolderInUse as FolderInUse,
        Hold as Hold,
        check_output_dir as check_output_dir,
        last_evaluation as last_evaluation,
        overlap as overlap,
    )
    from .package_files import (
        accelerate_file as accelerate_file,
        config_file as config_file,
        did_you_mean as did_you_mean,
        find as find,
        recipe as recipe,
        root as root,
    )
    from .redaction import redacted as redacted
    from .settings import check_settings as check_settings, refuse as refuse, setting as setting
else:
    __getattr__, __dir__, __all__ = lazily(__name__, __file__)
