"""Resume runs in every trainer, but only from a checkpoint that is complete and belongs to the run."""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from datasets import Dataset
from transformers import TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput

from ..models.adapters import adapter_facts, quantization_of
from ..models.identity import config_identity, tokenizer_identity, tokenizer_names, weights_identity
from ..models.weights import base_model_of
from ..upstream.names import get_config_model_id, is_deepspeed_zero3_enabled, rotate_checkpoints
from ..upstream.temporarily import temporarily
from .changes import Names, differences
from .halts import CannotResume, Stopped, forget_stop, spoilt, stop_of
from .marker import MARKER, IncompleteCheckpoint, check_files, checkpoints_of, read_marker, write_marker
from .needs import check_monitors
from .output_dir import Hold
from .processes import from_first, on_first
from .redaction import pickled_without_credentials, without_credentials
from .rows import rows_identity
from .saving import BackgroundSaving
from .saving import result_of as result_of  # for recipes, as the next
from .saving import save_trained as save_trained
from .schedule import schedule, steps_of
from .sources import source_identity
from .writer import NotSaved, is_of_writing, not_saved

# Beginnings of the fields that may differ when a run goes on: they only change what is shown and kept, and the speed
_MAY_DIFFER = tuple(
    """
    dataloader_num dataloader_pe dataloader_pi dataloader_pre ddp_ debug disable_tqdm
    distribution_shift_ do_ enable_jit eval_ hub_ local_rank log_ logging_ num_completions_to_print
    num_generations_eval on_save_failure output_dir per_device_eval project push_to_hub
    record_ report_to restore_callback resume_ run_name save_ skip_memory torch_empty_cache trackio
    vllm_gpu vllm_group vllm_server watch
    """.split()
)
_SAY_YOURSELF = ' (If a reward function has an attribute `identity = "…"`, that alone is compared.)'
_GIVEN = ("compute_loss_func", "optimizer_cls_and_kwargs")  # arguments of every Trainer that are Python


def fingerprint(args: TrainingArguments, **facts: Any) -> dict[str, Any]:
    """Return, as JSON, what must be the same for a run to resume exactly: fields of `args`, and all `facts`."""
    told = {name: value for name, value in args.to_dict().items() if not name.startswith(_MAY_DIFFER)}
    return json.loads(json.dumps(without_credentials({**told, **facts}), default=str))


def newest_complete(output_dir: str) -> tuple[str | None, dict[str, str]]:
    """
    Return the newest complete checkpoint in `output_dir`, and a mapping from incomplete checkpoints to the reasons.

    The checkpoint is None if there is none.
    """
    finished: list[tuple[int, str, dict]] = []
    skipped: dict[str, str] = {}
    for path in checkpoints_of(output_dir).values():
        try:
            marker = read_marker(str(path))
            finished.append((marker["written_ns"], str(path), marker))
        except IncompleteCheckpoint as reason:
            skipped[str(path)] = str(reason)
    for _, checkpoint, marker in sorted(finished, reverse=True):
        try:
            check_files(checkpoint, marker)
            return checkpoint, skipped
        except IncompleteCheckpoint as reason:
            skipped[checkpoint] = str(reason)
    return None, skipped


def _newest_checkpoint(output_dir: str) -> str | None:
    """
    Return the newest complete checkpoint in `output_dir`, or None; print which incomplete checkpoints are skipped.
    """
    checkpoint, skipped = newest_complete(output_dir)
    for path, reason in sorted(skipped.items()):
        print(f"Skipping {path}: it is not complete: {reason}.")
    return checkpoint


def _checked_marker(checkpoint: str) -> dict[str, Any]:
    """Return a checkpoint's marker (the list of its files); raise [`CannotResume`] if a file is missing or changed."""
    if not os.path.isdir(checkpoint):
        raise CannotResume(f"{checkpoint} is not a folder, so there is nothing to resume from. Check the path.")
    try:
        marker = read_marker(checkpoint)
        check_files(checkpoint, marker)
    except IncompleteCheckpoint as reason:
        raise CannotResume(
            f"{checkpoint} is not a complete checkpoint: {reason}. Pass another checkpoint, or `True` for the newest "
            "complete one."
        ) from None
    return marker


def _on_first(find: Callable[..., Any], *args: Any) -> Any:
    """Call `find`, which reads checkpoints, on the first process alone, and return its result on every process."""
    try:
        return on_first(find, *args)
    except OSError as error:
        raise CannotResume(
            f"Checkpoints cannot be read ({error}). Check that folder, or pass another checkpoint."
        ) from None


def checkpoint_to_resume(args: TrainingArguments) -> str | bool | None:
    """
    Return what a recipe passes to `train` as `resume_from_checkpoint`, so that the same command run again resumes.

    The result depends on the setting `resume_from_checkpoint`:

    - unset: the newest complete checkpoint; None if there is none
    - `true`: True, so that `train` takes the newest complete checkpoint, and raises if there is none
    - `false`: False, so that `train` begins anew
    - a path: the path
    """
    asked = args.resume_from_checkpoint
    if asked is None:
        return _on_first(_newest_checkpoint, args.output_dir)
    words = {"true": True, "false": False}  # the field is a string, on the command line and in YAML
    return words.get(str(asked).lower(), asked)


def _options(optimizer: Any) -> list[dict[str, Any]]:
    """Return the options of an optimizer's parameter groups, such as learning rates."""
    return [{name: group[name] for name in group if name != "params"} for group in optimizer.param_groups]


class ResumableRun(BackgroundSaving):
    """
    Extend a trainer: `train` resumes from checkpoints that are complete and belong to this run, and refuses others.

    `train()` starts anew, as in every `Trainer`. `train(resume_from_checkpoint=True)` goes on from the newest complete
    checkpoint in `output_dir`; with a path in place of True, from the checkpoint at that path.

    - If the checkpoint was written with other settings, it is refused, and the error names them, unless
      `resume_anyway` is set.
    - If the run is complete, the checkpoint is loaded, and nothing is trained.
    - If a monitor ended the run, it is refused, unless `resume_anyway` is set, or `resume_from_checkpoint=False` says
      to begin anew.

    While this run trains, no other process may run in `output_dir`; see [`~trl_ext.runs.output_dir.Hold`].

    Args:
        model, *args, **kwargs: arguments of the trainer that is extended.
        run_facts: further facts that must be the same for a run to resume, as JSON by name. The trainer's arguments,
            the weights, configuration and adapters of the model, the tokenizer and the training data are always
            compared.
        resume_anyway: whether to resume from a checkpoint with other settings, too; also a field of PPOConfig and
            DPOConfig.
    """

    def __init__(
        self,
        model: Any = None,
        *args: Any,
        run_facts: dict[str, Any] | None = None,
        resume_anyway: bool = False,
        **kwargs: Any,
    ):
        self._given_facts = run_facts or {}
        self._facts: dict[str, Any] = {}  # about what was passed in
        self._settings: dict[str, Any] = {}  # of this run, taken when training starts
        self._names: Names = {}  # names for settings that are hashes
        self._model_path = model if isinstance(model, str) else None
        self.start_path = self._model_path or getattr(model, "adapter_path", None)
        self.given_rows, self.given_eval_rows = kwargs.get("train_dataset"), kwargs.get("eval_dataset")
        self._resume_anyway = resume_anyway
        self._given: list[dict[str, Any]] = []  # the options of the optimizer's groups, as the arguments say
        self._is_changed = False  # this run goes on from one with other settings
        self._has_printed_schedule = False
        super().__init__(model, *args, **kwargs)

    @property
    def _given_model(self) -> Any:
        """Return the model that was passed to the trainer, with its adapters."""
        return self.accelerator.unwrap_model(self.model)

    def _run_facts(self) -> dict[str, Any]:
        """
        Return, as JSON, what must be the same for a run to resume exactly, besides the training arguments.

        Every process calls this once, before the first step; the result of the first process is used.
        """
        model = self._given_model
        revision = (getattr(self.args, "model_init_kwargs", None) or {}).get("revision")
        facts: dict[str, Any] = {
            "model": weights_identity(model, self._model_path, revision),
            "model_config": config_identity(model),
            "dtype": str(model.dtype),
            "quantization": quantization_of(model),
            "tokenizer": tokenizer_identity(self.processing_class),
            "data_collator": source_identity(self.data_collator),
            "processes": self.accelerator.num_processes,
            "mixed_precision": self.accelerator.mixed_precision,  # `accelerate launch` may say it
            **{name: source_identity(getattr(self, name, None)) for name in _GIVEN},
        }
        if hasattr(model, "peft_config"):
            facts |= adapter_facts(model)
        if self.optimizer is not None:  # it was passed in
            facts["optimizer"] = [type(self.optimizer).__qualname__, _options(self.optimizer)]
        if self.lr_scheduler is not None:
            functions = [source_identity(function) for function in getattr(self.lr_scheduler, "lr_lambdas", [])]
            facts["lr_scheduler"] = [type(self.lr_scheduler).__qualname__, self.lr_scheduler.state_dict(), functions]
        return {**facts, **self._given_facts}

    def _data_facts(self) -> dict[str, Any]:
        """Return the number and the hash of the training rows, as facts of the run; an empty dict for a stream."""
        data = self.train_dataset
        return {"train_rows": len(data), "train_data": rows_identity(data)} if isinstance(data, Dataset) else {}

    def _run_names(self) -> Names:
        """
        Return descriptions of those facts that are hashes, to print when a checkpoint is refused.

        The descriptions themselves are not compared.
        """
        config = base_model_of(self._given_model).config
        names = {
            "model": {"name": self._model_path or get_config_model_id(config) or type(self._given_model).__name__},
            "model_config": config.to_diff_dict(),
            "tokenizer": tokenizer_names(self.processing_class),
            "data_collator": {"name": type(self.data_collator).__qualname__},
        }
        if isinstance(self.train_dataset, Dataset):
            names["train_data"] = {"columns": sorted(self.train_dataset.column_names)}
        return names

    def _check_marker(self, checkpoint: str, marker: dict[str, Any]) -> None:
        """Raise an error if this run cannot resume from a checkpoint for a reason other than different settings."""

    def _before_resuming(self, checkpoint: str) -> None:
        """Prepare to resume from a checkpoint, after it has been checked and before its state is loaded."""

    def _save_own_state(self, checkpoint: str) -> None:
        """Save state that transformers does not save, on all processes, before the checkpoint counts as complete."""

    def _load_own_state(self, checkpoint: str) -> None:
        """Load the state that [`_save_own_state`] saved."""

    def _schedule(self) -> str:
        """Return a summary of the run to print when it begins."""
        return schedule(self)

    def _steps(self) -> int | None:
        """Return the optimizer steps of the whole run; None if a stream has no end."""
        return steps_of(self)

    def _print_schedule(self) -> None:
        if not self._has_printed_schedule:  # `train` may be called again
            self.accelerator.print(self._schedule())
        self._has_printed_schedule = True

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> TrainOutput:
        with Hold(self.args.output_dir):
            try:
                return self._train_alone(resume_from_checkpoint, **kwargs)
            except KeyboardInterrupt as error:
                newest, _ = newest_complete(self.args.output_dir)
                again = f"resumes from {newest}" if newest else "restarts, since there is no complete checkpoint yet"
                raise KeyboardInterrupt(f"The same command {again}.") from error

    def _train_alone(self, resume_from_checkpoint: str | bool | None, **kwargs: Any) -> TrainOutput:
        check_monitors(self)  # callbacks may have been added
        if not self._has_printed_schedule:
            self._print_what_waits()
        if not self._facts:  # only at the first call: training changes what was passed in
            self._facts = self._run_facts()
        # FSDP may load weights on the first process alone
        facts = from_first({**self._facts, **(self._data_facts() if self.accelerator.is_main_process else {})})
        self._settings = fingerprint(self.args, **facts)
        self._names = json.loads(json.dumps(without_credentials(self._run_names()), default=str))
        self._check_stop(resume_from_checkpoint)
        found = _on_first(self._find_checkpoint, resume_from_checkpoint)
        if found is None:
            self._print_schedule()
            return self._trained(**kwargs)
        checkpoint, is_same = found
        self._is_changed = not is_same
        state = TrainerState.load_from_json(os.path.join(checkpoint, "trainer_state.json"))
        if is_same and state.global_step >= state.max_steps:
            end = f"Training is complete, at step {state.global_step}"
            if is_deepspeed_zero3_enabled():
                raise CannotResume(
                    f"{end}, and ZeRO-3 can load weights only into a run that continues. Take them from {checkpoint}."
                )
            self.accelerator.print(f"{end}: loading {checkpoint}.")
            self._load_from_checkpoint(checkpoint)
            self._load_own_state(checkpoint)
            self.state = state
            if self.args.load_best_model_at_end and state.best_model_checkpoint is not None:
                beside = Path(checkpoint).with_name(Path(state.best_model_checkpoint).name)
                if beside.is_dir():  # the output directory may have been moved
                    state.best_model_checkpoint = str(beside)
                _on_first(_checked_marker, state.best_model_checkpoint)
                self._load_best_model()
            return TrainOutput(state.global_step, float("nan"), {})
        self._before_resuming(checkpoint)
        self._load_own_state(checkpoint)
        self._print_schedule()
        total = self._steps() or state.max_steps  # as set now
        self.accelerator.print(f"Resuming from {checkpoint}, step {state.global_step} of {total}.")
        return self._trained(resume_from_checkpoint=checkpoint, **kwargs)

    def _trained(self, **kwargs: Any) -> TrainOutput:
        try:
            output = super().train(**kwargs)
        except BaseException:
            self._complete_after_an_error()
            raise
        if sentence := spoilt(self.state):
            raise Stopped(sentence)  # a script that went on would save the weights as if they were good
        return output

    @property
    def _goes_on_anyway(self) -> bool:
        return self._resume_anyway or getattr(self.args, "resume_anyway", False)

    def _check_stop(self, resume: str | bool | None) -> None:
        """Raise [`Stopped`] if a monitor ended this run; forget it if the run begins anew or goes on anyway."""
        folder = self.args.output_dir
        stopped = _on_first(stop_of, folder, "repeat the command with `--resume_anyway true` (`resume_anyway=True`)")
        if stopped is None:
            return
        if not (resume is False or self._goes_on_anyway):
            raise Stopped(f"{stopped}.")
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            forget_stop(folder)
        self.accelerator.wait_for_everyone()

    def _find_checkpoint(self, resume: str | bool | None) -> tuple[str, bool] | None:
        """
        Return the checkpoint to resume from, and whether it was written with the same settings; None to start anew.
        """
        if resume is None or resume is False:
            return None
        checkpoint = _newest_checkpoint(self.args.output_dir) if resume is True else str(resume)
        if checkpoint is None:
            raise CannotResume(f"No complete checkpoint in {self.args.output_dir}, so there is nothing to resume.")
        marker = _checked_marker(checkpoint)
        self._check_marker(checkpoint, marker)
        names = marker.get("names") if isinstance(marker.get("names"), dict) else {}
        different = differences(marker["configuration"], self._settings, names, self._names)
        if different and not self._goes_on_anyway:
            raise CannotResume(
                f"{checkpoint} belongs to another configuration ({'; '.join(different)}). Use the settings that it "
                "was written with, or choose another `output_dir` to start anew, or set `resume_anyway=True` "
                "(`--resume_anyway true`) to go on from it all the same."
                f"{_SAY_YOURSELF if any(d.startswith('reward ') for d in different) else ''}"
            )
        if different:
            print(f"Going on from {checkpoint} with other settings: {'; '.join(different)}.")
        return checkpoint, not different

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        scheduler = super().create_scheduler(*args, **kwargs)
        # The options that the arguments ask for; a checkpoint's optimizer brings options of its own
        self._given = _options(self.optimizer)
        return scheduler

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        groups = self.optimizer.param_groups
        if checkpoint is None or not self._is_changed or len(groups) != len(self._given):
            return
        for group, given in zip(groups, self._given, strict=True):
            before, now = group.get("initial_lr"), given.get("initial_lr")
            group.update({name: value for name, value in given.items() if name != "lr"})
            if before and now is not None:  # the schedule's factor of this step is kept
                group["lr"] *= now / before
        scheduler = self.lr_scheduler.state_dict()
        if "base_lrs" in scheduler and all("initial_lr" in group for group in groups):
            rates = {"base_lrs": [g["initial_lr"] for g in groups], "_last_lr": [g["lr"] for g in groups]}
            self.lr_scheduler.load_state_dict(scheduler | rates)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> TrainOutput:
        self._check_saving(wait=True)
        self._writer.close()
        # Else transformers leaves only the best checkpoint, and the same command again would train what comes after
        with temporarily(self.args, save_total_limit=None):
            return super()._finalize_training(*args, **kwargs)

    # Both write training_args.bin
    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        with temporarily(self.args, **pickled_without_credentials(self.args)):
            super()._save(output_dir, state_dict=state_dict)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._is_pushed:
            self._writer.write_now()  # what was kept back is part of what is uploaded
        with temporarily(self.args, **pickled_without_credentials(self.args)):
            super()._push_from_checkpoint(checkpoint_folder)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if spoilt(self.state):
            return
        if trial is not None:  # of a search for hyperparameters, which has a folder of its own and never resumes
            super()._save_checkpoint(model, trial)
            return
        self._check_saving(wait=True)  # one at a time
        run_dir, best = self.args.output_dir, self.state.best_model_checkpoint
        checkpoint = os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        is_behind = self._saves_in_background and self._upload is None
        keeps_back = is_behind or self._goes_on_unsaved
        name = from_first(uuid4().hex) if keeps_back else ""  # not a counter: processes' counters may differ
        error: Exception | None = None
        try:
            if self.args.should_save:
                Path(checkpoint, MARKER).unlink(missing_ok=True)
            # Older checkpoints may only go once this one is complete
            keeping_back = self._writer.deferring(copies=is_behind) if keeps_back else nullcontext()
            with temporarily(self.args, save_total_limit=None), keeping_back:
                super()._save_checkpoint(model, trial)
                if not self.args.save_only_model:
                    self._save_own_state(checkpoint)
            if not keeps_back:
                self.accelerator.wait_for_everyone()
                if self.args.should_save:
                    self._complete(run_dir, checkpoint)
                return
        except Exception as failure:
            if not is_of_writing(failure):
                raise
            # Else the other processes would wait for this one in a collective that it has left
            is_between_collectives = self.accelerator.num_processes == 1 or not (
                self.is_fsdp_enabled or self.is_deepspeed_enabled or self.state.best_global_step
            )
            if not (keeps_back and is_between_collectives):
                if self.accelerator.num_processes == 1:  # else others may still write
                    self._forget_unsaved(checkpoint, best)
                raise NotSaved(self._unsaved(not_saved(checkpoint, failure), goes_on=False)) from failure
            error = failure
        self._being_saved = checkpoint, best
        complete = partial(self._complete, run_dir, checkpoint) if self.args.should_save else None
        processes, rank = self.accelerator.num_processes, self.accelerator.process_index
        self._writer.start(complete, processes, rank, error, name)
        if not is_behind:
            self._check_saving(wait=True)

    def _complete(self, run_dir: str, checkpoint: str) -> None:
        """Mark a checkpoint as complete once all processes have written it, and delete the oldest checkpoints."""
        if not self.args.save_only_model:  # else there is nothing to resume from
            write_marker(checkpoint, self._settings, self.accelerator.num_processes, self._names)
            if self.args.save_total_limit:  # interrupted checkpoints are deleted before complete ones
                paths = [*checkpoints_of(run_dir).values()]
                interrupted = [path for path in paths if not (path / MARKER).is_file()]
                for path in interrupted[: max(0, len(paths) - self.args.save_total_limit)]:
                    shutil.rmtree(path, ignore_errors=True)
        rotate_checkpoints(
            output_dir=run_dir,
            save_total_limit=self.args.save_total_limit,
            best_model_checkpoint=self.state.best_model_checkpoint,
            use_mtime=True,
        )
