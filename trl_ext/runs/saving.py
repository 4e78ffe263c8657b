"""Write checkpoints, optionally in the background; if one cannot be written, end the run or continue without it.

A file that is written last, the marker, says that a checkpoint is complete.
"""

import json
import os
import shutil
import threading
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import psutil
from accelerate.utils import gather_object
from safetensors import SafetensorError
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ..upstream.statements import temporarily
from .control import saving_forbidden
from .files import flush, from_first, on_first, whole_file

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object  # a mixin: the trainer that it is mixed into has the methods

logger = logging.get_logger(__name__)

_MEMORY = "/dev/shm"
_STAGED = "trl_ext_checkpoint_"
MARKER = "trl_ext_complete.json"
_NO_STATE = {MARKER, f"{MARKER}.tmp", "README.md", "checkpoint-is-incomplete.txt"}  # that by `enable_jit_checkpoint`


class NotSaved(RuntimeError):
    """Raised when a checkpoint could not be written; the message has the cause, the folder and what to do."""


def is_of_writing(error: BaseException) -> bool:
    """
    Return whether an error means that a file could not be written; False for errors of the hub, which have no `errno`.
    """
    if isinstance(error, OSError):
        return error.errno is not None
    of_torch_save = ("inline_container.cc", "iostream error")
    return isinstance(error, SafetensorError) or any(part in str(error) for part in of_torch_save)


def not_saved(path: str | os.PathLike[str], error: BaseException) -> str:
    """
    Return a clause that says that the file at `path` could not be written, why (`error`), and how much disk space is
    free.
    """
    folder = Path(path).parent
    cause = str(getattr(error, "strerror", None) or error).strip().splitlines()[0]
    free = shutil.disk_usage(folder).free / 2**30
    return f"{Path(path).name} could not be written to {folder} ({cause}; {free:.1f} GiB are free there)"


def save_trained(trainer: Any, metrics: dict[str, float]) -> None:
    """
    Save a model, then its metrics, in this order because the model matters more if the disk becomes full.

    Args:
        trainer: a Trainer that has trained.
        metrics: metrics that `train` returned. They are empty, and not saved, if the run was complete before.
    """
    trainer.save_model()
    if metrics:
        trainer.save_metrics("train", metrics)


def last_evaluation(trainer: Any, result: Any) -> dict[str, float]:
    """
    Return the trained model's metrics on the evaluation set by name, such as `eval_loss`, with the `epoch`.

    These are the metrics of the evaluation at the last step, if `train` made one; if not, the model is evaluated now.
    It is also evaluated now if the run was complete before, or with `load_best_model_at_end`: then the model may be
    that of an earlier checkpoint.

    Args:
        trainer: any Trainer, after training.
        result: the result of `train`.
    """
    state = trainer.state
    is_of_now = result.metrics and not trainer.args.load_best_model_at_end
    logs = [log for log in state.log_history if is_of_now and log["step"] == state.global_step]
    found = {name: number for log in logs for name, number in log.items() if name.startswith("eval_")}
    return {**found, "epoch": state.epoch} if found else trainer.evaluate()


class BackgroundSaving(_Trainer):
    """
    Extend a trainer: write checkpoints according to [`~trl_ext.runs.settings.RunSettings`], also in the background.

    A checkpoint in the background is first written into memory, or into `staging_dir`: `checkpoint-N` is a link to a
    folder there, so the code that saves need not change. A thread of the first process then copies the folder to the
    output directory, in place of the link, and marks it as complete. The thread takes part in no collective.
    """

    # Set by `ResumableRun.train`
    _settings: dict[str, Any]  # of this run, which the marker keeps
    _size: int | None  # bytes of a checkpoint; None until one is written or resumed from

    def __init__(self, *args: Any, **kwargs: Any):
        self._has_warned_of_room = False
        self._being_saved: tuple[Path, tuple] | None = None  # a checkpoint, and the best one before it
        self._thread: threading.Thread | None = None  # of the first process
        self._error: Exception | None = None  # of that thread
        self._best: tuple = ()
        super().__init__(*args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._check_saving()
        self._best = self.state.best_metric, self.state.best_global_step, self.state.best_model_checkpoint
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if saving_forbidden(self.state):
            return
        if trial is not None:  # of a search for hyperparameters, which has a folder of its own and never resumes
            super()._save_checkpoint(model, trial)
            return
        self._check_saving(wait=True)  # one at a time
        checkpoint = Path(self.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        in_memory: Path | None = None
        error: Exception | None = None
        try:
            in_memory = on_first(self._begin, checkpoint)
            with temporarily(self.args, save_total_limit=None):  # old ones go once this one is complete
                super()._save_checkpoint(model, trial)
                if not self.args.save_only_model:
                    self._save_own_state(str(checkpoint))
        except Exception as failure:
            if not is_of_writing(failure):
                raise
            if self.accelerator.num_processes > 1 and (
                self.is_fsdp_enabled or self.is_deepspeed_enabled or self.state.best_global_step
            ):  # the others wait in a collective that this process has left
                raise NotSaved(self._unsaved(not_saved(checkpoint, failure), goes_on=False)) from failure
            error = failure
        self._being_saved = checkpoint, self._best
        causes = gather_object([error and not_saved(checkpoint, error)])  # by then, all have written
        if not any(causes) and self.args.should_save:
            finish = (checkpoint, in_memory, Path(self.state.best_model_checkpoint or "").name)
            # No daemon: a program that ends waits until all is written
            self._thread = threading.Thread(target=self._finish, args=finish, daemon=False)
            self._thread.start()
        if in_memory is None or any(causes):
            self._check_saving(wait=True, causes=causes)

    def _save_last_step(self) -> str | None:
        """Save the last finished step, unless it is saved; return its checkpoint, None if that is not complete."""
        if not self.state.global_step:
            return None
        checkpoint = os.path.join(self.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        self._check_saving(wait=True)  # a save may be under way
        if on_first(read_marker, checkpoint) is None:  # other machines may not see it
            self._save_checkpoint(self.model_wrapped, None)
            self._check_saving(wait=True)
        return checkpoint if on_first(read_marker, checkpoint) else None

    def _save_own_state(self, checkpoint: str) -> None:
        """Override to save more into `checkpoint`: on all processes, before the marker, unless `save_only_model`."""

    def _load_own_state(self, checkpoint: str) -> None:
        """Override to load it, before the Trainer resumes."""

    def _begin(self, checkpoint: Path) -> Path | None:
        """Prepare to write a checkpoint; return its folder in memory, None if it is written to the disk directly."""
        Path(checkpoint, MARKER).unlink(missing_ok=True)
        remove_links(checkpoint.parent)
        if not getattr(self.args, "save_in_background", False) or self._size is None:
            return None  # the first one says how much room one takes
        folder = self.args.staging_dir or _MEMORY
        processes = self.args.world_size
        is_shared = self.args.staging_dir or int(os.getenv("LOCAL_WORLD_SIZE", processes)) == processes
        free = shutil.disk_usage(folder).free if os.path.isdir(folder) else 0
        if folder == _MEMORY:
            free = min(free, psutil.virtual_memory().available)
        if not is_shared or free < self._size:
            if not self._has_warned_of_room:
                logger.warning(
                    f"`save_in_background` needs {self._size / 2**30:.1f} GiB in {folder}, which "
                    + (f"has {free / 2**30:.1f} GiB free" if is_shared else "the other machines do not see")
                    + ": training waits for each checkpoint. Set `staging_dir` to a folder with room that all "
                    "machines see."
                )
            self._has_warned_of_room = True
            return None
        in_memory = Path(mkdtemp(prefix=_STAGED, dir=folder))
        shutil.rmtree(checkpoint, ignore_errors=True)  # an incomplete one of a run before
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        checkpoint.symlink_to(in_memory)
        return in_memory

    def _finish(self, checkpoint: Path, in_memory: Path | None, best: str) -> None:
        """Move a checkpoint from `in_memory`, if any, to the disk; mark it as complete; delete old ones but `best`."""
        try:
            if in_memory is not None:
                # `checkpoint` stays a link to memory, and readable there, until the copy is whole
                part = checkpoint.with_name(f"_{checkpoint.name}")  # a Trainer uploads no such name
                shutil.rmtree(part, ignore_errors=True)
                shutil.copytree(in_memory, part, symlinks=True)
                link = checkpoint.rename(part.with_suffix(".memory"))  # kept, since a kill would forget the memory
                part.rename(checkpoint)
                shutil.rmtree(in_memory)
                link.unlink()
            if self.args.save_only_model:  # there is nothing to resume from
                self._size = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
            else:
                self._size = write_marker(checkpoint, self._settings)
            delete_old(checkpoint, self.args.save_total_limit, best)
        except Exception as failure:
            self._error = failure
            if in_memory is not None:
                shutil.rmtree(in_memory, ignore_errors=True)

    def _abandon_saving(self) -> None:
        """Wait, after an error in training, until a checkpoint in memory is written. This uses no collective."""
        if self._thread is not None:
            self._thread.join()
        if self._being_saved and self._error is not None:
            print(f"{not_saved(self._being_saved[0], self._error)}.")
        if self.args.should_save:
            remove_links(Path(self.args.output_dir))
        self._being_saved = None
        self._thread = None
        self._error = None

    def _check_saving(
        self,
        wait: bool = False,  # until the checkpoint in the background is written
        causes: list[str | None] | None = None,  # for each process, `not_saved` on what it failed to write
    ) -> None:
        """Remove a checkpoint that could not be written; raise [`NotSaved`], or print why. All processes call this."""
        if self._being_saved is None:
            return
        if wait and self._thread is not None:
            self._thread.join()
        is_busy = self._thread is not None and self._thread.is_alive()
        cause = None if is_busy or self._error is None else not_saved(self._being_saved[0], self._error)
        is_busy, cause = from_first((is_busy, cause))
        if is_busy:
            return
        checkpoint, best = self._being_saved
        self._being_saved = None
        self._thread = None
        self._error = None
        cause = next(filter(None, [*(causes or []), cause]), None)
        if cause is None:
            return
        if self.state.best_global_step and checkpoint.name == f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}":
            # Later checkpoints are compared with the best that exists
            self.state.best_metric, self.state.best_global_step, self.state.best_model_checkpoint = best
        if self.args.should_save:  # it would take space, and count for `save_total_limit`
            remove_links(checkpoint.parent)
            for path in (checkpoint, checkpoint.with_name(f"_{checkpoint.name}")):
                shutil.rmtree(path, ignore_errors=True)
        goes_on = getattr(self.args, "on_save_failure", "stop") == "continue" or bool(saving_forbidden(self.state))
        if not goes_on:
            raise NotSaved(self._unsaved(cause, goes_on))
        self.accelerator.print(self._unsaved(cause, goes_on))

    def _unsaved(self, cause: str, goes_on: bool) -> str:
        if goes_on:
            return f"{cause}. This does not end the run."
        return (
            f"{cause}, so training ends at step {self.state.global_step}. Correct the cause (if the disk is full, "
            "make room), then run the same command again: it resumes from the newest complete checkpoint."
        )


def remove_links(output_dir: Path) -> None:
    """Remove checkpoints that a killed run has left in memory, and the links to them in its folder."""
    for link in filter(Path.is_symlink, output_dir.glob("*checkpoint-*")):
        if link.resolve().name.startswith(_STAGED):  # others are a user's own
            shutil.rmtree(link.resolve(), ignore_errors=True)
            link.unlink()


def how_to_resume(fix: str, step: int, checkpoint: str | None) -> str:
    """
    Return a sentence on how to resume a run that ended after `step` optimizer steps; `fix` is what to do first, and
    `checkpoint` holds the last step, None if it was not saved.
    """
    if not step:
        return f"No step was finished. {fix}, then begin again."
    resume = f"{fix}, then run the same command (in Python `train(resume_from_checkpoint=True)`): it resumes from"
    if checkpoint is None:  # `save_only_model`, or a full disk with `on_save_failure: continue`
        return f"{resume} the newest complete checkpoint, if there is one."
    return f"The training so far is saved. {resume} {checkpoint}."


def write_marker(checkpoint: str | os.PathLike[str], settings: dict[str, Any]) -> int:
    """
    Mark a checkpoint as complete, by a file; return the size of the checkpoint's other files in bytes.

    Call this on one process, after all processes have written their files. The files are flushed to the disk before
    the marker, so a checkpoint with a marker is complete even after a loss of power.

    Args:
        settings: the run's settings. A resumed run compares them with its own.
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
