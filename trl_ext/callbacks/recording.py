"""Make a run record its logs and some of its completions, and write a page when it ends."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from transformers import TrainerCallback
from transformers.utils import logging

from ..data import first_prompts, save_trained_prompts
from .jsonl import JSONLCallback
from .samples import AnswersCallback, SamplesCallback

logger = logging.get_logger(__name__)
# Imported by name: the workbench, above this layer, makes pages. Without it a run has no page
_PAGES = "trl_ext.workbench"


class ReportCallback(TrainerCallback):
    """
    Write the page `report.html` when training ends; if the page cannot be written, log a warning.

    Args:
        rows: training rows. Hashes of their prompts are kept beside the model, so that `trl-ext evaluate` can refuse
            prompts that the model was trained on.
        start: folder or hub name of the model that the run starts from.
    """

    def __init__(self, rows: Any = None, start: str | None = None):
        self.rows, self.start = rows, start

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            save_trained_prompts(args.output_dir, self.rows, self.start, is_uploaded=args.push_to_hub)

    def on_train_end(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        try:
            import_module(_PAGES).write_report(args.output_dir)
        except Exception as error:  # the model is what the run was for
            why = "this package has no workbench" if _is_of_pages(error) else " ".join(str(error).split())
            logger.warning(f"No page of this run was written: {why}")


def record_run(trainer: Any, samples: bool = False, objections: Sequence[str] = ()) -> None:
    """
    Make a run record its logs, unless it does so already, and write a page that shows them when training ends.

    PPOTrainer, DPOTrainer and CriticTrainer call this by themselves, if `record_run` is set in their configurations.
    Only the main process writes.

    Args:
        trainer: any Trainer.
        samples: whether to keep some completions of each rollout, too. Only PPOTrainer and RLOOTrainer allow it.
        objections: objections of reward reports to the reward models, from [`trl_ext.workbench.objections`]. The page
            shows them.
    """
    present = trainer.callback_handler.callbacks
    recorder = next((callback for callback in present if isinstance(callback, JSONLCallback)), None)
    if recorder is None:
        recorder = JSONLCallback(every_process=False)
        trainer.add_callback(recorder)
    recorder.objections = recorder.objections or [*objections]
    if samples and not any(isinstance(callback, SamplesCallback) for callback in present):
        trainer.add_callback(SamplesCallback(trainer=trainer))
    if asked := _asked(trainer):
        trainer.add_callback(AnswersCallback(trainer=trainer, prompts=asked))
    # The page is of the output directory: a run that records elsewhere has none
    if recorder.folder is None and not any(isinstance(callback, ReportCallback) for callback in present):
        rows = getattr(trainer, "given_rows", None)  # as they were before they were tokenized
        rows = getattr(trainer, "train_dataset", None) if rows is None else rows
        trainer.add_callback(ReportCallback(rows, getattr(trainer, "start_path", None)))


def _asked(trainer: Any) -> list[Any]:
    """
    Return the prompts of the first `record_answers` evaluation rows or, if there are no such rows, training rows.

    Return [] if the trainer has no such setting, or already has an `AnswersCallback`.
    """
    count = getattr(trainer.args, "record_answers", 0)
    if not count or any(isinstance(callback, AnswersCallback) for callback in trainer.callback_handler.callbacks):
        return []
    rows = next((each for name in ("given_eval_rows", "given_rows") if (each := getattr(trainer, name, None))), None)
    prompts = first_prompts(next(iter(rows.values())) if isinstance(rows, dict) else rows, count)
    if not prompts:
        raise ValueError(
            f"`record_answers={count}` needs prompts, but the rows have none: give rows with `prompt` or `messages`, "
            "or set `record_answers` to 0"
        )
    return prompts


def objections_to(rewards: Sequence[Any]) -> list[str]:
    """Return the objections of reward reports to these rewards; [] if the reports cannot be read."""
    try:
        return import_module(_PAGES).objections(rewards)
    except Exception as error:  # a report that cannot be read ends no run
        if not _is_of_pages(error):
            logger.warning(f"Reports on the rewards could not be read: {' '.join(str(error).split())}")
        return []


def _is_of_pages(error: Exception) -> bool:
    """Return whether an import error means that this installation of the package has no pages."""
    return isinstance(error, ModuleNotFoundError) and str(error.name).startswith(_PAGES)
