"""Which checkpoints can be trusted, and whether they belong to this run: the same for every trainer."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from transformers import TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput

from .data.identity import rows_identity
from .marker import MARKER, IncompleteCheckpoint, check_files, read_marker, write_marker
from .models.adapters import adapter_facts, quantization_of
from .models.identity import config_identity, tokenizer_identity, weights_identity
from .sources import source_identity
from .temporarily import temporarily
from .upstream import is_deepspeed_zero3_enabled, rotate_checkpoints

# Fields that may differ between a run and its continuation: they change what is shown, kept or how fast it goes
_MAY_DIFFER = (
    "dataloader_num",
    "dataloader_pe",
    "dataloader_pi",
    "dataloader_pre",
    "dataset_num_proc",
    "ddp_",
    "debug",
    "disable_tqdm",
    "distribution_shift_",
    "do_",
    "enable_jit",
    "eval_",
    "hub_",
    "local_rank",
    "log_",
    "logging_",
    "num_completions_to_print",
    "num_generations_eval",
    "num_sample_generations",
    "output_dir",
    "per_device_eval",
    "project",
    "push_to_hub",
    "report_to",
    "restore_callback",
    "resume_",
    "run_name",
    "save_",
    "skip_memory",
    "torch_empty_cache",
    "trackio",
    "vllm_gpu",
    "vllm_group",
    "vllm_server",
)


class CannotResume(ValueError):
    """A checkpoint is not there, not complete, or of another run."""


def fingerprint(args: TrainingArguments, **facts: Any) -> dict[str, Any]:
    """What must be equal for a run to be continued exactly."""
    config = {name: value for name, value in args.to_dict().items() if not name.startswith(_MAY_DIFFER)}
    return json.loads(json.dumps({**config, **facts}, default=str))


def newest_complete(output_dir: str) -> tuple[str | None, dict[str, str]]:
    """The complete checkpoint in `output_dir` that was finished last, and why those beside it were not taken."""
    finished: list[tuple[int, str, dict]] = []
    skipped: dict[str, str] = {}
    for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        if not path.name.rpartition("-")[2].isdigit():
            continue
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


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [f"{name}: {a.get(name)!r} → {b.get(name)!r}" for name in sorted({*a, *b}) if a.get(name) != b.get(name)]


def newest_checkpoint(output_dir: str) -> str | None:
    """The complete checkpoint in `output_dir` that was finished last, if there is one; says which ones it skips."""
    checkpoint, skipped = _on_first_process(newest_complete, output_dir)
    for path, reason in sorted(skipped.items()):
        PartialState().print(f"Skipping {path}: it is not complete: {reason}.")
    return checkpoint


def _checked_marker(checkpoint: str) -> dict[str, Any]:
    """Return the marker of a checkpoint that was asked for; raise if it is not there as it was written."""
    if not os.path.isdir(checkpoint):
        raise CannotResume(f"{checkpoint} is no folder, so there is nothing to resume from: check the path.")
    try:
        marker = read_marker(checkpoint)
        check_files(checkpoint, marker)
    except IncompleteCheckpoint as reason:
        raise CannotResume(
            f"{checkpoint} is not a complete checkpoint: {reason}. Pass another one, or `True` for the newest "
            "complete one."
        ) from None
    return marker


def _on_first_process(find: Callable[..., Any], *args: Any) -> Any:
    """Call a function on the first process; all return its result, or raise its CannotResume."""
    found: list[Any] = [None]
    if PartialState().is_main_process:
        try:
            found[0] = find(*args)
        except CannotResume as error:
            found[0] = error
    if PartialState().num_processes > 1:
        broadcast_object_list(found)
    if isinstance(found[0], CannotResume):
        raise found[0]
    return found[0]


def checkpoint_to_resume(args: TrainingArguments) -> str | bool | None:
    """
    What a recipe passes to `train`, so that the same command again goes on: the newest complete checkpoint, unless
    `resume_from_checkpoint` says otherwise (a path, `true` for "there must be one", `false` for "start anew").
    """
    asked = args.resume_from_checkpoint
    if asked is None:
        return newest_checkpoint(args.output_dir)
    words = {"true": True, "false": False}  # the field is a string, on the command line and in YAML
    return words.get(str(asked).lower(), asked)


class ResumableRun:
    """
    Mixin of trainers: a checkpoint says whether it is complete and of which run it is, and `train` refuses others.

    `train()` starts anew, as in every `Trainer`. `train(resume_from_checkpoint=True)` goes on from the newest complete
    checkpoint in `output_dir`, and a path from that one. If the settings of the run that wrote it differ, it is
    refused with their names, unless `resume_anyway` is set. A run that is complete is loaded and not trained again.

    Args:
        model, *args, **kwargs: the trainer's own.
        run_facts: what else must be equal for a run to go on: JSON by name. Known by themselves are the trainer's
            arguments, the weights, configuration and adapters of the model, the tokenizer and the training data.
        resume_anyway: go on from a run of other settings all the same; also a field of PPOConfig and DPOConfig.
    """

    args: Any
    accelerator: Any
    state: Any
    model: Any
    optimizer: Any
    processing_class: Any
    data_collator: Any
    train_dataset: Any

    def __init__(
        self,
        model: Any = None,
        *args: Any,
        run_facts: dict[str, Any] | None = None,
        resume_anyway: bool = False,
        **kwargs: Any,
    ):
        self._given_facts = run_facts or {}
        self._settings: dict[str, Any] = {}  # of this run, taken when training starts
        self._model_path = model if isinstance(model, str) else None
        self._resume_anyway = resume_anyway
        super().__init__(model, *args, **kwargs)  # type: ignore[call-arg]

    # ---- What a trainer adds ----

    @property
    def _given_model(self) -> Any:
        """The model that was passed in, with its adapters."""
        return self.accelerator.unwrap_model(self.model)

    def _run_facts(self) -> dict[str, Any]:
        """
        What must be equal for a run to go on exactly, beside its arguments; JSON.

        It is called once, before the first step. Every process must call it, the result is the first one's.
        """
        model, data = self._given_model, self.train_dataset
        revision = (getattr(self.args, "model_init_kwargs", None) or {}).get("revision")
        facts: dict[str, Any] = {
            "model": weights_identity(model, self._model_path, revision),
            "model_config": config_identity(model),
            "dtype": str(model.dtype),
            "quantization": quantization_of(model),
            "tokenizer": tokenizer_identity(self.processing_class),
            "data_collator": source_identity(self.data_collator),
            "processes": self.accelerator.num_processes,
        }
        if hasattr(model, "peft_config"):
            facts |= adapter_facts(model)
        if self.optimizer is not None:  # it was passed in
            facts["optimizer"] = type(self.optimizer).__qualname__
        if isinstance(data, Dataset):
            facts |= {"train_rows": len(data), "train_data": rows_identity(data)}
        return {**facts, **self._given_facts}

    def _check_marker(self, checkpoint: str, marker: dict[str, Any]) -> None:
        """Raise if this run cannot go on from a checkpoint, for reasons other than its settings."""

    def _before_resuming(self, checkpoint: str) -> None:
        """Prepare for going on from a checkpoint that was found to be good."""

    def _save_own_state(self, checkpoint: str) -> None:
        """Write what transformers does not, on all processes, before the checkpoint counts as complete."""

    def _load_own_state(self, checkpoint: str) -> None:
        """Load that, before going on from a checkpoint, or from one of a run that is complete."""

    # ---- Training ----

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> TrainOutput:
        if not self._settings:  # later, training has changed what was passed in
            facts = [self._run_facts()]
            broadcast_object_list(facts)  # FSDP may load weights on the first process alone
            self._settings = fingerprint(self.args, **facts[0])
        found = _on_first_process(self._find_checkpoint, resume_from_checkpoint)
        if found is None:
            return super().train(**kwargs)  # type: ignore[misc]
        checkpoint, is_same = found
        state = TrainerState.load_from_json(os.path.join(checkpoint, "trainer_state.json"))
        if is_same and state.global_step >= state.max_steps:
            if is_deepspeed_zero3_enabled():
                raise CannotResume(
                    f"Training is complete, at step {state.global_step}, and ZeRO-3 loads weights only into a run "
                    f"that goes on: take them from {checkpoint}."
                )
            self.accelerator.print(f"Training is complete, at step {state.global_step}: loading {checkpoint}.")
            self._load_from_checkpoint(checkpoint)  # type: ignore[attr-defined]
            self._load_own_state(checkpoint)
            self.state = state
            if self.args.load_best_model_at_end and state.best_model_checkpoint is not None:
                _on_first_process(_checked_marker, state.best_model_checkpoint)
                self._load_best_model()  # type: ignore[attr-defined]
            return TrainOutput(state.global_step, float("nan"), {})
        self._before_resuming(checkpoint)
        self._load_own_state(checkpoint)
        self.accelerator.print(f"Resuming from {checkpoint}, step {state.global_step} of {state.max_steps}.")
        return super().train(resume_from_checkpoint=checkpoint, **kwargs)  # type: ignore[misc]

    def _find_checkpoint(self, resume: str | bool | None) -> tuple[str, bool] | None:
        """Return the checkpoint to go on from, and whether its run had these settings; None to start anew."""
        if resume is None or resume is False:
            return None
        checkpoint = newest_checkpoint(self.args.output_dir) if resume is True else str(resume)
        if checkpoint is None:
            raise CannotResume(f"No complete checkpoint in {self.args.output_dir}, so there is nothing to resume.")
        marker = _checked_marker(checkpoint)
        self._check_marker(checkpoint, marker)
        different = differences(marker["configuration"], self._settings)
        if different and not (self._resume_anyway or getattr(self.args, "resume_anyway", False)):
            raise CannotResume(
                f"{checkpoint} belongs to another configuration ({'; '.join(different)}). Use the settings that it "
                "was written with, or choose another `output_dir` to start anew, or set `resume_anyway=True` to go "
                "on from it all the same."
            )
        return checkpoint, not different

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        run_dir = self._get_output_dir(trial=trial)  # type: ignore[attr-defined]
        checkpoint = os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        if self.args.should_save:
            Path(checkpoint, MARKER).unlink(missing_ok=True)
        # Older checkpoints may only go once this one is complete
        with temporarily(self.args, save_total_limit=None):
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
        if not self.args.save_only_model:
            self._save_own_state(checkpoint)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            if not self.args.save_only_model:  # there is nothing to resume from
                write_marker(checkpoint, self._settings, self.accelerator.num_processes)
            rotate_checkpoints(
                output_dir=run_dir,
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )
