"""Write checkpoints while training continues; if one cannot be written, end the run or continue without it."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from transformers.utils import ENV_VARS_TRUE_VALUES

from ..upstream.temporarily import temporarily
from .halts import spoilt
from .marker import MARKER, step_of
from .writer import OTHERS_PART, PAUSE, CheckpointWriter, NotSaved, is_of_writing, not_saved

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object  # a mixin: the trainer that it is mixed into has the methods

_UPLOADERS = {  # tracker -> the variable, and its values, that make it upload a checkpoint in `on_save`
    "wandb": ("WANDB_LOG_MODEL", {"CHECKPOINT"}),
    "mlflow": ("HF_MLFLOW_LOG_ARTIFACTS", ENV_VARS_TRUE_VALUES),
    "clearml": ("CLEARML_LOG_MODEL", ENV_VARS_TRUE_VALUES),
}

MODEL = "The model"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin")


@contextmanager
def result_of(output_dir: str | os.PathLike[str], what: str, goes_on: str | None = None) -> Iterator[None]:
    """
    Run a block that writes a part of a run's result; if that part cannot be written, raise [`NotSaved`] on all
    processes.

    Every process must enter and leave the block, and no collective may follow a write in it. Weights that were written
    only in part are removed: beside files of an earlier run they would look whole.

    Args:
        output_dir: the run's folder.
        what: name of the part, as the beginning of a sentence: "The model".
        goes_on: words for the error on what running the same command again will do. The default says that it resumes
            or, without a checkpoint, begins anew.
    """
    before, failure = _written(output_dir), None
    try:
        yield
    except Exception as error:
        if not is_of_writing(error) or (isinstance(error, OSError) and error.errno is None):  # the hub's error, say
            raise
        failure = error
        for path in [path for path, time in _written(output_dir).items() if before.get(path) != time]:
            path.unlink(missing_ok=True)
        Path(output_dir, "train_results.json").unlink(missing_ok=True)  # with it, the run would count as finished
    cause = failure and not_saved(os.path.join(output_dir, what), failure)
    if causes := [*filter(None, gather_object([cause]))]:
        has_checkpoint = any(Path(output_dir).glob(f"checkpoint-*/{MARKER}"))
        goes_on = goes_on or ("resumes from the newest complete checkpoint" if has_checkpoint else "begins anew")
        kept = "" if what == MODEL else "The model is saved. "
        raise NotSaved(
            f"{causes[0]}. {kept}Correct the cause (if the disk is full, make room), then run the same command again: "
            f"it {goes_on}."
        ) from failure


def save_trained(trainer: Any, metrics: dict[str, float]) -> None:
    """
    Save a model, then its metrics: if the disk becomes full, the model matters more.

    Args:
        trainer: a Trainer that has trained.
        metrics: metrics that `train` returned. If they are empty, since the run was complete already, they are not
            saved.
    """
    with result_of(trainer.args.output_dir, MODEL):
        trainer.save_model()
    with result_of(trainer.args.output_dir, "The training metrics"):
        if metrics:
            trainer.save_metrics("train", metrics)


def _json(path: Path) -> str | None:
    """Return the text of a JSON file; None if the file is missing, or is not whole since the disk was full."""
    try:
        text = path.read_text(encoding="utf-8")
        json.loads(text)
    except (OSError, ValueError):
        return None
    return text


def _written(folder: str | os.PathLike[str]) -> dict[Path, int]:
    """Return a mapping from each file of weights in a folder, but not in its checkpoints, to its time of writing."""
    paths = [path for pattern in _WEIGHTS for at in ("", "critic/") for path in Path(folder).glob(f"{at}{pattern}")]
    return {path: path.stat().st_mtime_ns for path in paths}


class BackgroundSaving(_Trainer):
    """
    Extend a trainer: write checkpoints as [`~trl_ext.runs.settings.SavingSettings`] say, in the background if asked.

    While a thread writes a checkpoint, the processes tell each other between two steps whether they are done. The
    thread itself takes part in no collective.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        self._being_saved: tuple[str, str | None] | None = None  # a checkpoint, and the best one before it
        self._save_failure: str | None = None  # a sentence on a failed save, until it is printed or raised
        super().__init__(*args, **kwargs)
        # Sharding gathers weights into new memory each time, so pinning it does not pay
        self._writer = CheckpointWriter(pins=not (self.is_fsdp_enabled or self.is_deepspeed_enabled))

    @property
    def _saves_in_background(self) -> bool:
        return getattr(self.args, "save_in_background", False)

    @property
    def _goes_on_unsaved(self) -> bool:
        return getattr(self.args, "on_save_failure", "stop") == "continue"

    @property
    def _is_pushed(self) -> bool:
        """Return whether transformers uploads each checkpoint before `on_save`."""
        return self.args.push_to_hub and self.args.hub_strategy != "end"

    @property
    def _upload(self) -> str | None:
        """
        Return words on what uploads each checkpoint as soon as it is written, and on how to switch that off; None if
        nothing uploads them.
        """
        if self._is_pushed:
            return "`push_to_hub` uploads each: set `hub_strategy='end'` to upload only the model at the end"
        for tracker in self.args.report_to or []:
            variable, values = _UPLOADERS.get(tracker, ("", set()))
            if os.getenv(variable, "").upper() in values:
                return f"{tracker} uploads each: unset {variable} to send it only numbers"
        return None

    def _print_what_waits(self) -> None:
        plugin = self.accelerator.state.fsdp_plugin if self.is_fsdp_enabled else None
        if not self._saves_in_background:
            return
        if self._upload is not None:
            self.accelerator.print(f"`save_in_background`: training waits for each checkpoint, since {self._upload}.")
        elif plugin is not None and "FULL" not in str(plugin.state_dict_type):
            why = (
                "all processes write it together. Set `fsdp_state_dict_type: FULL_STATE_DICT` to have one process "
                "write it"
            )
            self.accelerator.print(f"`save_in_background`: training waits for FSDP's part of each checkpoint: {why}.")

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._check_saving()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _check_saving(self, wait: bool = False) -> None:
        """
        Check whether the checkpoint in the background is written; with `wait`, wait until it is.

        If it could not be written, raise [`NotSaved`]; if the run goes on all the same, only print the reason.
        """
        self._look_at_saving(wait)
        sentence, self._save_failure = self._save_failure, None
        if sentence is None:
            return
        if not (self._goes_on_unsaved or spoilt(self.state)):
            raise NotSaved(sentence)
        self.accelerator.print(sentence)

    def _look_at_saving(self, wait: bool = True) -> None:
        """
        Wait until the checkpoint in the background is written; without `wait`, only check whether it is.

        If it could not be written, store the reason, and remove the checkpoint. Call this on all processes.
        """
        if self._being_saved is None:
            return
        is_busy, has_failed = self._writing()
        while wait and is_busy:  # all wait together: if a process has died, the collective in `_writing` fails
            self._writer.wait(PAUSE if self.accelerator.num_processes > 1 else None)
            is_busy, has_failed = self._writing()
        if is_busy:
            return
        (checkpoint, best), self._being_saved = self._being_saved, None
        if has_failed:
            causes = gather_object([self._writer.error and not_saved(checkpoint, self._writer.error)])
            cause = min(filter(None, causes), key=lambda text: OTHERS_PART in text)
            self._save_failure = self._unsaved(cause, self._goes_on_unsaved)
            self._forget_unsaved(checkpoint, best)

    def _writing(self) -> list[bool]:
        """Return two values: whether any process is still writing, and whether any process has failed to write."""
        mine = [self._writer.is_busy, self._writer.error is not None]
        if self.accelerator.num_processes == 1:
            return mine
        everyones = torch.tensor(mine, dtype=torch.int32, device=self.accelerator.device)
        return (self.accelerator.reduce(everyones, reduction="sum") > 0).tolist()

    def _unsaved(self, cause: str, goes_on: bool) -> str:
        if goes_on:
            return f"{cause}. Training continues (`on_save_failure: continue`)."
        or_else = "" if self._goes_on_unsaved else " Or set `on_save_failure: continue`."
        return (
            f"{cause}, so training ends at step {self.state.global_step}. Correct the cause (if the disk is full, "
            f"make room), then run the same command again: it resumes from the newest complete checkpoint.{or_else}"
        )

    def _forget_unsaved(self, checkpoint: str, best: str | None) -> None:
        """
        Remove a checkpoint that could not be written whole: it would take space, and count for `save_total_limit`.

        If the run counted it as the best one, `best`, the best one before it, is the best again.
        """
        state, metric = self.state, f"eval_{str(self.args.metric_for_best_model).removeprefix('eval_')}"
        if state.best_model_checkpoint == checkpoint:
            state.best_model_checkpoint = best
        if state.best_global_step == step_of(Path(checkpoint)):
            # Later checkpoints are compared with the best that exists
            state.best_global_step = step_of(Path(best)) if best else None
            measured = {log["step"]: log[metric] for log in state.log_history if metric in log}
            state.best_metric = measured.get(state.best_global_step)
        if self.args.should_save:
            shutil.rmtree(checkpoint, ignore_errors=True)

    def save_metrics(self, split: str, metrics: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Save metrics as every Trainer does, but write each file whole or leave it unchanged."""
        if not self.is_world_process_zero():
            return
        output_dir, added_to = Path(self.args.output_dir), "all_results.json"
        with tempfile.TemporaryDirectory(dir=output_dir, prefix="_") as folder:
            if (before := _json(output_dir / added_to)) is not None:
                Path(folder, added_to).write_text(before)
            with temporarily(self.args, output_dir=folder):
                super().save_metrics(split, metrics, *args, **kwargs)
            # `train_results.json` is the last one: it marks a run as finished
            for path in sorted(Path(folder).iterdir()):
                path.replace(output_dir / path.name)

    def _complete_after_an_error(self) -> None:
        """
        Wait, after an error in training, until the checkpoint in the background is written.

        The checkpoint is complete if all processes wrote their parts; else print why not. This uses no collective.
        """
        if self._being_saved is None:
            return self._writer.close()
        if self._writer.is_busy:
            print(f"Waiting for {self._being_saved[0]} to be written.")
        self._writer.wait(after_an_error=True)
        if self._writer.error is not None:
            print(f"{not_saved(self._being_saved[0], self._writer.error)}.")
        self._being_saved = None
        self._writer.close()
