"""Refuse to resume a run that a callback stopped or rolled back, until a setting changes."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .files import whole_file
from .marker import checkpoints_of, step_of, time_after_checkpoints

RECORD = "trl_ext_rollback.json"  # in the output directory, until a run that was changed has saved a checkpoint
ASIDE = "rolled_back"  # beginning of the new names of excluded checkpoints, which hides them from transformers
_ANNOUNCED = "trl_ext_rollback"  # the key of this run's rollback in `TrainerState.stateful_callbacks`


class CannotResume(ValueError):
    """Refuse to resume: the checkpoint is missing, incomplete or from other settings, or the run was rolled back."""


class Halting:
    """
    Extend a callback that ends runs: [`~trl_ext.runs.checkpoints.ResumableRun`] asks it whether a run may begin.

    Attributes:
        run_facts: what distinguishes this run from others beside its training arguments, such as a hash of the model.
            `ResumableRun` sets it; None in other trainers.
        finish_saving: function that waits for the checkpoint that is being written. Call it on all processes before
            checkpoints are chosen or renamed. `ResumableRun` sets it; None in other trainers.
    """

    run_facts: dict[str, Any] | None = None
    finish_saving: Callable[[], None] | None = None

    def stop_that_holds(self, args: Any, state: Any) -> str | None:
        """
        Return a sentence if `state` says that this callback stopped the run, and no setting has changed since; else
        return None.
        """
        raise NotImplementedError

    def rollback_that_holds(self, args: Any, rollback: "Rollback", is_resumed: bool) -> str | None:
        """
        Return a sentence if this callback made the `rollback`, and no setting has changed since; else return None.

        `is_resumed` says whether the run asks to resume from a checkpoint.
        """
        raise NotImplementedError


@dataclass
class Rollback:
    """
    Record a rollback in a file of the output directory.

    Args:
        step: optimizer step of the rollback.
        good_step: newest step known to be good: the next run resumes from the newest checkpoint up to this step.
        checkpoint: path of that checkpoint, if there is one.
        monitor: class name of the callback that rolled back.
        what: what the callback found.
        arguments: arguments of the callback. At least one of them, or of `settings`, must change before the next run.
        settings: settings of the run.
        written_ns: time at which this record was written, in ns.
    """

    step: int
    good_step: int
    checkpoint: str | None
    monitor: str
    what: str
    arguments: dict[str, Any]
    settings: dict[str, Any]
    written_ns: int = 0

    @classmethod
    def read(cls, output_dir: str) -> "Rollback | None":
        record = Path(output_dir, RECORD)
        if not record.is_file():
            return None
        try:
            return cls(**json.loads(record.read_text()))
        except (ValueError, TypeError):
            raise CannotResume(
                f"A monitor rolled this run back, and {record} is damaged or was written by another version of "
                "trl_ext. Begin anew with `resume_from_checkpoint=False`; or delete that file, and each "
                f"{PREFIX_CHECKPOINT_DIR} that the run must not go on from."
            ) from None

    def write(self, output_dir: str) -> None:
        """
        Write the record, then rename the checkpoints after the good step.

        In this order a loss of power in between does no harm: a checkpoint that the record excludes is not resumed.
        """
        self.written_ns = time_after_checkpoints(output_dir)
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        with whole_file(Path(output_dir, RECORD), durably=True) as temporary:
            temporary.write_text(json.dumps(asdict(self), indent=2))
        self.set_aside(output_dir)

    def set_aside(self, output_dir: str) -> list[int]:
        """Rename the checkpoints after the good step, so that no run resumes from them, and return their steps."""
        excluded = {step: path for step, path in checkpoints_of(output_dir).items() if self.excludes(str(path))}
        for path in excluded.values():
            name = f"{ASIDE}-{self.step}-{path.name}"
            taken = sum(other.name.startswith(name) for other in Path(output_dir).iterdir())
            path.rename(path.with_name(f"{name}-{taken}" if taken else name))
        return sorted(excluded)

    def excludes(self, checkpoint: str, written_ns: int | None = None) -> bool:
        """
        Return whether a checkpoint comes after the good step, and was written before this record.

        `written_ns` is the time at which the checkpoint was written; by default it is the time of its folder.
        """
        step = step_of(Path(checkpoint))
        if step is None or step <= self.good_step:
            return False
        return (Path(checkpoint).stat().st_mtime_ns if written_ns is None else written_ns) <= self.written_ns

    def is_before(self, checkpoint: str) -> bool:
        """Return whether a checkpoint is at or before the good step, so that a run may resume from it."""
        step = step_of(Path(checkpoint))
        return step is not None and step <= self.good_step

    def sentence(self, output_dir: str, why: str = "nothing has been changed since") -> str:
        onwards = f"goes on from {self.checkpoint}" if self.checkpoint else "starts anew, since no checkpoint is good"
        return (
            f"{self.monitor} rolled this run back at step {self.step} ({self.what}), and {why}. Change a setting of "
            f"the run or of the monitor, then run the same command again: it {onwards}. To try it unchanged, delete "
            f"{Path(output_dir, RECORD)}"
        )


def good_checkpoint(output_dir: str, good_step: int) -> str | None:
    """Return the path of the newest checkpoint at or before `good_step`; None if there is none."""
    older = {step: path for step, path in checkpoints_of(output_dir).items() if step <= good_step}
    return str(older[max(older)]) if older else None


def forget_rollback(output_dir: str) -> None:
    """Delete the record of a rollback, if there is one."""
    if Path(output_dir, RECORD).is_file():  # `output_dir` may be a file, which another check reports
        Path(output_dir, RECORD).unlink(missing_ok=True)


def announce_rollback(state: Any, sentence: str) -> None:
    """Store in `state` that this run was rolled back, so that the trainer and other callbacks do not save it."""
    state.stateful_callbacks[_ANNOUNCED] = {"sentence": sentence}


def rolled_back(state: Any) -> str | None:
    """Return the sentence on this run's rollback that `announce_rollback` stored; None without a rollback."""
    announced = state.stateful_callbacks.get(_ANNOUNCED)
    return announced and announced["sentence"]


def digest(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
