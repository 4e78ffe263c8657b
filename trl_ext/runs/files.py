"""Write the files of a run atomically or line by line, without importing torch and transformers."""

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

PRIVATE_FOLDER = "_run"  # a Trainer uploads nothing whose name begins with an underscore
# The key of all monitors' states in `TrainerState.stateful_callbacks`. Monitors are no `ExportableState`, which would
# use their classes' names: with `restore_callback_states_from_checkpoint` transformers would rebuild them from JSON,
# without `trainer=`, and a monitor added on resume would crash the next save.
REGISTRY = "trl_ext_monitors"
RUNBOOK = "docs/runbook.md"


@contextmanager
def whole_file(path: str | os.PathLike[str], durably: bool = False) -> Iterator[Path]:
    """
    Write a file atomically: `path` has either the whole new file or, after an error, the old one.

    The `with` block writes a temporary file beside `path`, at the yielded path. At the end of the block this file is
    renamed to `path`; after an error it is removed.

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
    """Write a text file atomically, and make its folder."""
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


def finite(value: Any, nan_as_null: bool = False) -> Any:
    """
    Convert a value to JSON types: arrays and tensors become numbers or lists of numbers, other objects become text.

    JSON has no NaN and no infinities. They become text, or None with `nan_as_null`.
    """
    if isinstance(value, dict):
        return {str(k): finite(v, nan_as_null) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v, nan_as_null) for v in value]
    if hasattr(value, "tolist"):
        return finite(value.tolist(), nan_as_null)
    if isinstance(value, float) and not math.isfinite(value):
        return None if nan_as_null else str(value)
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def is_finite_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a finite int or float; a bool does not count."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def append_jsonl(path: str | os.PathLike[str], *rows: dict[str, Any]) -> None:
    """
    Append objects to a file of JSON lines, and make its folder.

    The lines are with the operating system when this returns, so `kill -9` loses at most the lines of one call. If the
    file cannot be written, the lines are lost and a warning is logged, once for each file and cause.
    """
    if not rows:
        return
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":  # a process was killed while it wrote its last line
                    file.write(b"\n")
            lines = [json.dumps(finite(row), ensure_ascii=False) + "\n" for row in rows]
            # Half of a surrogate pair has no UTF-8; written as \udXXX, JSON reads it back as it was
            file.write("".join(lines).encode(errors="backslashreplace"))
    except OSError as error:
        from transformers.utils import logging  # here: who only reads files needs no transformers

        logging.get_logger(__name__).warning_once(
            f"{path} cannot be written ({error.strerror}): the run continues, and these lines are lost."
        )


def read_jsonl(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """
    Yield the objects of a file of JSON lines.

    A line that is no JSON object is skipped. A run leaves such a line if it is killed, or while it is writing.
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row


T = TypeVar("T")


def from_first(value: T) -> T:
    """Return the first process's `value` on every process; all processes must call this."""
    from accelerate.utils import broadcast_object_list  # here: the command line checks a folder without it

    return broadcast_object_list([value])[0]


def on_first(function: Callable[..., T], *args: object) -> T:
    """Call a function on the first process only; return its result, or raise its error, on every process."""
    from accelerate import PartialState

    found: tuple[T | None, Exception | None] = None, None
    if PartialState().is_main_process:
        try:
            found = function(*args), None
        except Exception as error:  # raised here alone, it would leave the others waiting
            found = None, error
    result, failure = from_first(found)
    if failure is not None:
        raise failure
    return result  # type: ignore[return-value]
