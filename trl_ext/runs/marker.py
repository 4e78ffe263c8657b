"""Mark checkpoints as complete: a marker is a file, written last, that lists the checkpoint's files."""

import json
import os
import time
from pathlib import Path
from typing import Any

import xxhash

from ..models.hashing import file_hash
from .files import flush, whole_file

MARKER = "trl_ext_complete.json"
_PREFIX = "checkpoint-"  # as transformers names them; to import it takes seconds


def write_marker(
    checkpoint: str, contents: dict[str, Any], processes: int, names: dict[str, Any] | None = None
) -> None:
    """
    Mark a checkpoint as complete: write its marker, the list of its files.

    Call this on one process, after all processes have written their files. The marker is written to the disk only when
    all other files are there, so a checkpoint with a marker survives a loss of power.

    Args:
        checkpoint: the checkpoint's folder.
        contents: settings that must be the same for a run to resume from the checkpoint.
        processes: number of processes that wrote the checkpoint.
        names: words that an error prints in place of the hashes in `contents`.
    """
    folder = Path(checkpoint)
    files = _files_of(folder)
    for path in [*files.values(), *(path for path in folder.rglob("*") if path.is_dir())]:
        flush(path)
    # The marker holds the time: a copied folder's files have the time of the copy
    now = time_after_checkpoints(folder.parent, but=folder)
    marker = {
        "written_ns": now,
        "processes": processes,
        "configuration": contents,
        "names": names or {},
        "files": {name: [path.stat().st_size, file_hash(path)] for name, path in files.items()},
    }
    with whole_file(folder / MARKER, durably=True) as temporary:
        temporary.write_text(json.dumps({**marker, "checksum": _checksum(marker)}, indent=2))
    if now > time.time_ns():
        os.utime(folder, ns=(now, now))  # transformers takes the newest one by this time
    flush(folder.parent)


def read_marker(checkpoint: str) -> dict[str, Any]:
    """
    Return the marker of a complete checkpoint: a mapping with `configuration`, `processes`, `written_ns`, `files` and,
    unless an earlier version wrote it, `names`.

    Raises:
        IncompleteCheckpoint: the marker is missing or cannot be read.
    """
    path = Path(checkpoint) / MARKER
    if not path.is_file():
        raise IncompleteCheckpoint(
            f"it has no {MARKER}: writing it was interrupted, `save_only_model` was set, or trl_ext did not write it"
        )
    try:
        marker = json.loads(path.read_text())
        if marker.pop("checksum") != _checksum(marker):
            raise ValueError
        # Another version may have written anything
        _ = marker["written_ns"] + 0, marker["configuration"].keys(), [(n, h) for n, h in marker["files"].values()]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise IncompleteCheckpoint(f"its {MARKER} is damaged, or was written by an earlier trl_ext") from None
    return marker


def check_files(checkpoint: str, marker: dict[str, Any]) -> None:
    """Raise an IncompleteCheckpoint if a file that the marker lists is missing, or differs from what was written."""
    found = _files_of(Path(checkpoint))
    for name, (size, digest) in marker["files"].items():
        if name not in found:
            raise IncompleteCheckpoint(f"{name} is missing")
        if found[name].stat().st_size != size:
            raise IncompleteCheckpoint(f"{name} has {found[name].stat().st_size} bytes, but {size} were written")
        if file_hash(found[name]) != digest:
            raise IncompleteCheckpoint(f"{name} is damaged, or was changed: its checksum is not the original one")


class IncompleteCheckpoint(ValueError):
    """Say that a checkpoint is not as a run wrote it; the message says why, as the end of a sentence."""


def checkpoints_of(output_dir: str | os.PathLike[str]) -> dict[int, Path]:
    """Return a mapping from step to folder for all checkpoints in a run's output directory."""
    found = {step_of(path): path for path in Path(output_dir).glob(f"{_PREFIX}*") if path.is_dir()}
    return {step: path for step, path in found.items() if step is not None}


def step_of(checkpoint: Path) -> int | None:
    """Return the step in a checkpoint's name; None for another name, such as `checkpoint-bad-6`."""
    number = checkpoint.name.removeprefix(_PREFIX)
    return int(number) if number.isdecimal() and number != checkpoint.name else None


def time_after_checkpoints(output_dir: str | os.PathLike[str], but: Path | None = None) -> int:
    """
    Return the present time in ns or, if a checkpoint is newer, a time shortly after that checkpoint.

    A checkpoint can be newer if the clock of the machine that wrote it was ahead. The checkpoint `but` does not count.
    """
    others = (path for path in checkpoints_of(output_dir).values() if path != but)
    return max([time.time_ns(), *(_written(path) + 10**6 for path in others)])


def _written(checkpoint: Path) -> int:
    try:
        return max(checkpoint.stat().st_mtime_ns, read_marker(str(checkpoint))["written_ns"])
    except IncompleteCheckpoint:
        return checkpoint.stat().st_mtime_ns


def _checksum(marker: dict[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(marker, sort_keys=True).encode()).hexdigest()


def _files_of(folder: Path) -> dict[str, Path]:
    """Return the files of a checkpoint that resuming needs: a mapping from name within the folder to path."""
    # transformers removes the last one after it has saved because of a SIGTERM (`enable_jit_checkpoint`)
    left_out = {MARKER, f"{MARKER}.tmp", "README.md", "checkpoint-is-incomplete.txt"}
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in left_out
    }
