"""Name the files of a run, and write each whole or not at all. This imports neither torch nor transformers."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PRIVATE_FOLDER = "_run"  # a Trainer uploads nothing whose name begins with an underscore
# The key of all monitors' states in `TrainerState.stateful_callbacks`. Monitors are no `ExportableState`, which would
# use their classes' names: with `restore_callback_states_from_checkpoint` transformers would rebuild them from JSON,
# without `trainer=`, and a monitor added on resume would crash the next save.
REGISTRY = "trl_ext_monitors"
RUNBOOK = "docs/runbook.md"


@contextmanager
def whole_file(path: str | os.PathLike[str], durably: bool = False) -> Iterator[Path]:
    """
    Write a file whole or not at all.

    The block writes a temporary file beside `path`, at the yielded path. At the end of the block this file is renamed
    to `path`; after an error it is removed.

    Args:
        path: the file's path; its folder exists.
        durably: whether the file must be on the disk, safe from a loss of power, when the block ends.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        yield temporary
        if durably:
            flush(temporary)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()  # on a full disk it would take the room of later files
        raise
    if durably:
        flush(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as temporary:
        # Half of a surrogate pair has no UTF-8; written as \udXXX, JSON reads it back as it was
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_notice(alert: dict[str, Any]) -> bool:
    """Return whether an alert is a notice: about a problem of the monitor itself, not of the run."""
    return alert.get("level") == "notice"
