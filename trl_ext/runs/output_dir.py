"""Check that a run can write to its output folder, and that no other run uses it."""

import json
import os
import socket
import tempfile
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from .files import on_first

LOCK = "_trl_ext.lock"  # in the output directory; a Trainer uploads nothing whose name begins with an underscore
_PATIENCE = 2.0  # seconds to wait for a killed process to end


def check_output_dir(output_dir: str | os.PathLike[str], resume: str | None = None) -> None:
    """
    Check that the output folder can be written, and holds no finished run that this run would overwrite.

    Args:
        output_dir: the folder, which need not exist yet.
        resume: the setting `resume_from_checkpoint`. With `"false"` a finished run may be overwritten.

    Raises:
        OSError: the folder cannot be written.
        FileExistsError: the folder holds a model without checkpoints. (A run with checkpoints is resumed.)
    """
    path = Path(output_dir)
    there = next((folder for folder in (path, *path.absolute().parents) if folder.exists()), path)
    with tempfile.TemporaryFile(dir=there):
        pass
    has_model = (path / "train_results.json").is_file() or any(path.glob("*.safetensors"))
    if has_model and not any(path.glob("checkpoint-*")) and str(resume).lower() != "false":
        raise FileExistsError(
            f"`output_dir` {output_dir} holds a model, but no checkpoint to resume from: choose another folder, or "
            "remove the model; training overwrites it with `resume_from_checkpoint: false`"
        )


class FolderInUse(OSError):
    """Raised when another process holds the folder; the message says which process, on which host, and since when."""


class Hold:
    """
    Lock a folder against the runs of other processes, until `release` or the end of a `with` block.

    The lock is a file in the folder. The kernel drops the lock when this process ends, in whatever way, and no child
    process inherits it. This process may make several holds of a folder; the folder is free again when all of them are
    released or deleted. If the folder cannot be locked, for example on a file system without locks, a line is printed,
    and other runs are not kept out.

    In a launch of several processes, all of them must make a hold. The first process locks the folder; if another run
    holds it, all processes raise the error.

    Args:
        folder: the folder, which need not exist yet.

    Raises:
        FolderInUse: another process holds the folder.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self._lock: Any = None
        on_first(self._acquire, Path(folder))

    def _acquire(self, folder: Path) -> None:
        self._lock = _locked(folder)

    def release(self) -> None:
        """Release the folder, so that another run can use it."""
        lock = self._lock
        self._lock = None
        if lock is None:
            return
        if lock.lock_counter == 1:
            with suppress(OSError):
                os.unlink(lock.lock_file)  # a process that has opened this file meanwhile sees that it is gone
        lock.release()

    def __enter__(self) -> "Hold":
        return self

    def __exit__(self, *error: Any) -> None:
        self.release()


def _locked(folder: Path) -> FileLock | None:
    """Lock a folder; return the lock, None if it cannot be locked; raise [`FolderInUse`] if another process has it."""
    # One object for each file, so that this process can lock it again
    lock = FileLock(folder.resolve() / LOCK, is_singleton=True, thread_local=False, on_acquired=_write_holder)
    try:
        lock.acquire(timeout=_PATIENCE)
    except Timeout:
        raise FolderInUse(
            f"`output_dir` {folder} is in use by {_holder(folder / LOCK)}: wait for that run, end it, or choose "
            "another `output_dir`"
        ) from None
    except OSError as error:  # a file system without locks, or a folder that nothing can be written to
        print(
            f"{folder} cannot be locked ({error.strerror or error}), so nothing stops a second run from writing to it."
        )
        return None
    return lock


def _write_holder(descriptor: int) -> None:
    """Write this process's pid and host into the lock file, which is open as `descriptor`."""
    who = {"pid": os.getpid(), "host": socket.gethostname(), "since": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"}
    with suppress(OSError):  # a full disk: it is locked all the same
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(who).encode(), 0)


def _holder(lock: Path) -> str:
    try:
        who = json.loads(lock.read_text())
        return f"process {who['pid']} on {who['host']}, since {who['since']}"
    except (OSError, ValueError, LookupError, TypeError):
        return "another process"


def overlap(folder: Path, given: Path) -> str:
    """
    Describe how the output folder `folder` overlaps with the input path `given`.

    Return a verb for a sentence, "holds" or "lies in the folder of"; "" if they do not overlap.
    """
    mine = folder.resolve()
    theirs = given.resolve()
    if mine == theirs or mine in theirs.parents:
        return "holds"
    # `datasets` reads a folder with all that lies below it
    return "lies in the folder of" if theirs in mine.parents and theirs.is_dir() else ""
