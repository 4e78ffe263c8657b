"""Whether a run can write where it is told to, asked before anything is loaded; files that are never half there."""

import os
import tempfile
from pathlib import Path
from typing import Any

from .marker import MARKER

_MARKERS = f"checkpoint-*/{MARKER}"


def check_output_dir(output_dir: str | os.PathLike[str], resume: str | None = None) -> None:
    """
    Check that the folder can be written, and holds no finished run that would be overwritten.

    Args:
        output_dir: it need not exist yet.
        resume: `resume_from_checkpoint`; `"false"` is to begin anew, whatever is there.

    Raises:
        OSError: it cannot be written.
        FileExistsError: a run without checkpoints has finished there. With checkpoints, it is gone on with.
    """
    path = Path(output_dir)
    there = next((folder for folder in (path, *path.absolute().parents) if folder.exists()), path)
    if not there.is_dir():
        raise NotADirectoryError(f"`output_dir` {output_dir}: {there} is no folder, choose another")
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise OSError(f"`output_dir` {output_dir} cannot be written ({error.strerror}): choose another") from error
    is_finished = (path / "train_results.json").is_file() and not any(path.glob("checkpoint-*"))
    if is_finished and str(resume).lower() != "false":
        raise FileExistsError(
            f"`output_dir` {output_dir} holds a finished run without checkpoints: choose another, or write "
            "over it by `resume_from_checkpoint: false`"
        )


def is_evaluated(output_dir: str | os.PathLike[str], result: Any, *files: str) -> bool:
    """
    Return whether the run was complete already, and so was its evaluation; says so.

    Files that are older than the run's newest checkpoint are of an earlier run.

    Args:
        output_dir: of the run.
        result: what `train` returned.
        *files: patterns of what the evaluation writes, `eval_results.json` if there are none.
    """
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    files, folder = files or ("eval_results.json",), Path(output_dir)
    newest = max((marker.stat().st_mtime for marker in folder.glob(_MARKERS)), default=0)
    found = [
        not result.metrics
        and all(any(path.stat().st_mtime >= newest for path in folder.glob(pattern)) for pattern in files)
    ]
    broadcast_object_list(found)  # another machine may not see the folder
    if found[0]:
        PartialState().print(f"{folder / files[0]} is left as it is; to evaluate again, delete it.")
    return found[0]


def write_text(path: Path, text: str) -> None:
    """Write a file that is in place when it is complete, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    # Half of a surrogate pair has no UTF-8; written as \udXXX, JSON reads it back as it was
    temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    temporary.replace(path)
