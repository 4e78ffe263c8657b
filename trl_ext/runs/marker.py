"""Mark checkpoints as complete by a file that is written last (the marker); find complete ones, delete old ones."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from .files import flush, whole_file

MARKER = "trl_ext_complete.json"
_NO_STATE = {
    MARKER,
    f"{MARKER}.tmp",
    "README.md",
    "checkpoint-is-incomplete.txt",
}  # the last by `enable_jit_checkpoint`


def write_marker(checkpoint: str | os.PathLike[str], settings: dict[str, Any]) -> int:
    """
    Mark a checkpoint as complete, by a file; return the size of the checkpoint's other files in bytes.

    Call this on one process, after all processes have written their files. The files are flushed to the disk before
    the marker, so a checkpoint with a marker is complete even after a loss of power.

    Args:
        checkpoint: the checkpoint's folder.
        settings: the run's settings, with which a resumed run compares its own.
    """
    folder = Path(checkpoint)
    paths = [path for path in sorted(folder.rglob("*")) if path.name not in _NO_STATE]
    for path in paths:
        flush(path)
    files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths if path.is_file()}
    with whole_file(folder / MARKER, durably=True) as temporary:
        # The time is written down, since a copied folder has the time of the copy
        marker = {"written_ns": time.time_ns(), "configuration": settings, "files": files}
        temporary.write_text(json.dumps(marker, indent=2))
    flush(folder.parent)
    return sum(files.values())


def read_marker(checkpoint: str | os.PathLike[str]) -> dict[str, Any] | None:
    """
    Return a checkpoint's marker; None if it is missing, or if a file that it names is missing or has another size.

    The marker's keys are `written_ns`, a Unix time in nanoseconds; `configuration`, the run's settings; and `files`,
    which maps each file's path within the checkpoint to its size in bytes.
    """
    folder = Path(checkpoint)
    try:
        marker = json.loads((folder / MARKER).read_text())
        is_whole = all((folder / name).stat().st_size == size for name, size in marker["files"].items())
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return None
    return marker if is_whole else None


def checkpoints_of(output_dir: str | os.PathLike[str]) -> list[Path]:
    """Return the checkpoints in a run's folder, complete or not."""
    return sorted(path for path in Path(output_dir).glob("checkpoint-*") if path.name[11:].isdecimal())


def newest_complete(output_dir: str | os.PathLike[str]) -> str | None:
    """Return the path of the newest complete checkpoint; None if there is none. Print which ones are incomplete."""
    markers = {path: read_marker(path) for path in checkpoints_of(output_dir)}
    for path in [path for path, marker in markers.items() if marker is None]:
        print(f"Skipping {path}: it is not complete.")
    written = {path: marker["written_ns"] for path, marker in markers.items() if marker is not None}
    return str(max(written, key=lambda path: written[path])) if written else None


def delete_old(newest: Path, limit: int | None, best: str | None) -> None:
    """
    Delete the oldest checkpoints beside `newest`, those without a marker first, until `limit` are left.

    The folder `newest`, and a checkpoint whose folder has the name `best`, are kept. If `limit` is None or 0, nothing
    is deleted.
    """
    paths = checkpoints_of(newest.parent)
    ages = {path: ((path / MARKER).is_file(), path.stat().st_mtime_ns) for path in paths if path.is_dir()}
    oldest_first = sorted(ages, key=lambda path: ages[path])
    spare = [path for path in oldest_first if path.name not in (newest.name, best)]
    for path in spare[: max(0, len(ages) - limit)] if limit else []:
        shutil.rmtree(path, ignore_errors=True)
