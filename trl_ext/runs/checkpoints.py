"""Resume runs in every trainer, but only from a checkpoint that is complete and belongs to the run."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState, TrainingArguments
from transformers.trainer_utils import TrainOutput

from ..models.adapters import adapter_facts
from ..models.weights import weights_identity
from ..upstream.names import is_deepspeed_zero3_enabled
from ..upstream.statements import temporarily
from .control import AgreedControl, CannotResume, Stopped, delete_stop, read_stop, saving_forbidden
from .files import from_first, on_first
from .output_dir import Hold
from .redaction import pickled_without_credentials, redacted
from .saving import BackgroundSaving, newest_complete, read_marker, remove_links

# Beginnings of the fields that are not compared: they only change what is shown and kept, and the speed
_MAY_DIFFER = tuple(
    """
    dataloader_num dataloader_pe dataloader_pi dataloader_pre ddp_ debug disable_tqdm
    do_ enable_jit eval_ hub_ local_rank log_ logging_ num_completions_to_print
    num_generations_eval on_save_failure output_dir per_device_eval project push_to_hub
    record_ report_to restore_callback resume_ run_name save_ skip_memory staging_dir torch_empty_cache trackio
    vllm_gpu vllm_group vllm_server
    """.split()
)
# Beginnings of differences: an adapter fits one base and its own settings, a KL is of one reference, the optimizer's
# state is of these weights, and a count of steps is of one size of steps and rollouts
_MUST_BE_SAME = (
    "model: ",
    *(f"adapter {name} {key}: " for name in ("default", "critic") for key in ("r", "lora_alpha", "target_modules")),
    "reference",
    "critic: ",
    "rows per step: ",
    "num_mini_batches: ",
    "num_ppo_epochs: ",
)


def fingerprint(args: TrainingArguments, **facts: Any) -> dict[str, Any]:
    """
    Return the values that must stay the same for an exact resume: a dict from each name to a JSON value.

    These are the fields of `args` that can change the training, and all `facts`. Credentials are redacted.
    """
    settings = {name: value for name, value in args.to_dict().items() if not name.startswith(_MAY_DIFFER)}
    return json.loads(json.dumps(redacted({**settings, **facts}), default=str))


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Compare the settings of two runs, dicts by name; return a text such as `seed: 1 → 2` for each that differs."""
    different = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    return [f"{name}: {before.get(name)!r} → {now.get(name)!r}" for name in different]


def checkpoint_to_resume(args: TrainingArguments) -> str | bool | None:
    """
    Return what a recipe passes to `train` as `resume_from_checkpoint`, so that repeating its command resumes the run.

    The result depends on the setting `resume_from_checkpoint`:

    - unset: the path of the newest complete checkpoint; None if there is none
    - `true`: True, so that `train` takes the newest complete checkpoint, and raises if there is none
    - `false`: False, so that `train` restarts
    - a path: the path
    """
    asked = args.resume_from_checkpoint
    if asked is None:
        return on_first(newest_complete, args.output_dir)
    words = {"true": True, "false": False}  # the field is a string, on the command line and in YAML
    return words.get(str(asked).lower(), asked)


class ResumableRun(AgreedControl, BackgroundSaving):
    """
    Extend a trainer: `train` resumes only from complete checkpoints, and reports what has changed since.

    `train()` restarts, as in every `Trainer`. `train(resume_from_checkpoint=True)` resumes from the newest complete
    checkpoint in `output_dir`; with a path in place of True, from the checkpoint at that path.

    - Settings that differ from those of the run that wrote the checkpoint are printed. [`CannotResume`] is raised if
      one of these differs: the base or start model, an adapter's rank, α or modules, the reference, whether PPO has a
      critic, `num_mini_batches`, `num_ppo_epochs`, or the number of rows in an optimizer step. If each process has
      saved a part of the checkpoint, the number of processes must also be the same.
    - If the run is complete, the checkpoint is loaded, and nothing is trained. Under ZeRO-3 this raises an error.
    - If a monitor ended the run in `output_dir`, `train` raises [`~trl_ext.runs.control.Stopped`], unless the
      setting `resume_anyway` is on, or `resume_from_checkpoint=False` restarts the run.

    While this run trains, no other process may run in `output_dir`; see [`~trl_ext.runs.output_dir.Hold`].

    Args:
        model, **kwargs: arguments of the trainer that is extended. `train_dataset` and `eval_dataset` are also kept as
            they were passed in, since TRL tokenizes them.
        run_facts: a dict of further facts to compare, whose values JSON can hold. The training arguments that can
            change the training, the model's weights and adapters, and the fingerprint of the training data are always
            compared.
    """

    _has_state_of_each_process = False  # whether a checkpoint fits one number of processes only

    def __init__(
        self,
        model: Any = None,
        *,
        run_facts: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        self._given_facts = run_facts or {}
        self._facts: dict[str, Any] = {}  # about what was passed in
        self._model_path = model if isinstance(model, str) else None
        self.start_path = self._model_path or getattr(model, "adapter_path", None)
        self.given_rows = kwargs.get("train_dataset")
        self.given_eval_rows = kwargs.get("eval_dataset")
        self._is_changed = False  # this run resumes one with other settings
        super().__init__(model, **kwargs)

    @property
    def _given_model(self) -> Any:
        """Return the model that was passed to the trainer, including its adapters; in PPO without the critic."""
        return self.accelerator.unwrap_model(self.model)

    def _run_facts(self) -> dict[str, Any]:
        """Return by name the facts that resuming compares besides the training arguments. All processes call this."""
        model = self._given_model
        rows = self.given_rows
        args = self.args
        revision = (getattr(args, "model_init_kwargs", None) or {}).get("revision")
        return {
            "model": weights_identity(model, self._model_path, revision),
            **(adapter_facts(model) if hasattr(model, "peft_config") else {}),
            "train_dataset": getattr(rows, "_fingerprint", None),
            "processes": self.accelerator.num_processes,
            "rows per step": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
            **self._given_facts,
        }

    def _steps(self) -> int:
        """Return the number of optimizer steps of the whole run, which the Trainer computes only once it trains."""
        with torch.random.fork_rng(devices=[]):  # accelerate may seed the sampler of this dataloader
            return self.set_initial_training_values(self.args, self.get_train_dataloader())[-1]

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> TrainOutput:
        if not any(weight.requires_grad for weight in self._given_model.parameters()):
            raise ValueError(
                "No weight of the model requires a gradient, so nothing would be trained. PEFT freezes what it "
                "merges: call `model.requires_grad_(True)`. An adapter must be merged before, or be trainable."
            )
        with Hold(self.args.output_dir):
            if not self._facts:  # only at the first call: training changes what was passed in
                self._facts = from_first(self._run_facts())  # FSDP may load weights on the first process alone
            self._settings = fingerprint(self.args, **self._facts)
            self._waiting = set()
            on_first(self._prepare_folder, resume_from_checkpoint)
            checkpoint, self._is_changed, self._size = on_first(self._find_checkpoint, resume_from_checkpoint)
            if checkpoint is not None:
                state = TrainerState.load_from_json(os.path.join(checkpoint, "trainer_state.json"))
                total = self._steps()
                if state.global_step >= total:
                    return self._load_complete(checkpoint, state)
                self._load_own_state(checkpoint)
                self.accelerator.print(f"Resuming from {checkpoint}, step {state.global_step} of {total}.")
            try:
                output = super().train(checkpoint, **kwargs)
            except BaseException:
                self._abandon_saving()
                raise
            if sentence := saving_forbidden(self.state):
                raise Stopped(sentence)  # a script that continued would save the weights as if they were good
            return output

    def _prepare_folder(self, resume: str | bool | None) -> None:
        """Remove a killed run's leftovers; raise [`Stopped`] if a monitor ended the run and it may not continue."""
        folder = self.args.output_dir
        remove_links(Path(folder))
        stopped = read_stop(folder, "repeat the command with `--resume_anyway true` (`resume_anyway=True`)")
        if stopped and not (resume is False or getattr(self.args, "resume_anyway", False)):
            raise Stopped(f"{stopped}.")
        delete_stop(folder)

    def _find_checkpoint(self, resume: str | bool | None) -> tuple[str | None, bool, int | None]:
        """Return the checkpoint to resume from, whether this run's settings differ from its, and its size in bytes."""
        if resume is None or resume is False:
            return None, False, None  # restart
        checkpoint = newest_complete(self.args.output_dir) if resume is True else str(resume)
        marker = read_marker(checkpoint) if checkpoint else None
        if checkpoint is None or marker is None:
            raise CannotResume(
                f"No complete checkpoint in {checkpoint or self.args.output_dir}. To train from the beginning, set "
                "`resume_from_checkpoint` to false."
            )
        different = differences(marker["configuration"], self._settings)
        needs_same: tuple[str, ...] = _MUST_BE_SAME
        if self._has_state_of_each_process or self.is_deepspeed_enabled or self.is_fsdp_enabled:
            needs_same += ("processes: ",)
        if refused := [text for text in different if text.startswith(needs_same)]:
            raise CannotResume(
                f"{checkpoint} cannot be resumed with {'; '.join(refused)}. Restore the old values, or start "
                "a new run in another `output_dir`."
            )
        if different:
            print(
                f"Warning: {checkpoint} was written with other settings: {'; '.join(different)}. From here on "
                "the new settings are used."
            )
        return checkpoint, bool(different), sum(marker["files"].values())

    def _load_complete(self, checkpoint: str, state: TrainerState) -> TrainOutput:
        """Load a complete run's last checkpoint or best model; return what `train` returns, with NaN as the loss."""
        end = f"Training is complete, at step {state.global_step}"
        if is_deepspeed_zero3_enabled():
            raise CannotResume(
                f"{end}, so nothing is left to train. Under ZeRO-3 the trained weights cannot be loaded back into the "
                f"trainer: load them from {checkpoint} in a script without DeepSpeed."
            )
        self.accelerator.print(f"{end}: loading {checkpoint}.")
        self._load_from_checkpoint(checkpoint)
        self._load_own_state(checkpoint)
        self.state = state
        if self.args.load_best_model_at_end and state.best_model_checkpoint is not None:
            # Beside the last one, since the output directory may have been moved
            state.best_model_checkpoint = str(Path(checkpoint).with_name(Path(state.best_model_checkpoint).name))
            if read_marker(state.best_model_checkpoint) is None:
                raise CannotResume(
                    f"{state.best_model_checkpoint}, the best checkpoint, is missing or incomplete and cannot be "
                    "loaded. To load the last one, set `load_best_model_at_end` to false."
                )
            self._load_best_model()
        return TrainOutput(state.global_step, float("nan"), {})

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        scheduler = super().create_scheduler(*args, **kwargs)
        # As the settings give them, such as the learning rate. A checkpoint's optimizer replaces them by its own, and
        # DeepSpeed loads it first of all
        groups = getattr(self.optimizer, "param_groups", ())
        self._given_options = [{name: group[name] for name in group if name != "params"} for group in groups]
        return scheduler

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or not self._is_changed:
            return
        groups = self.optimizer.param_groups
        for group, options in zip(groups, self._given_options, strict=False):
            before = group.get("initial_lr")
            now = options.get("initial_lr")
            group.update({name: value for name, value in options.items() if name != "lr"})
            if before and now is not None:  # the schedule's factor of this step is kept
                group["lr"] *= now / before
        scheduler = self.lr_scheduler.state_dict()
        if "base_lrs" in scheduler and all("initial_lr" in group for group in groups):
            rates = {"base_lrs": [g["initial_lr"] for g in groups], "_last_lr": [g["lr"] for g in groups]}
            self.lr_scheduler.load_state_dict(scheduler | rates)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> TrainOutput:
        self._check_saving(wait=True)
        # Else transformers leaves only the best checkpoint, and the same command again would train what comes after
        with temporarily(self.args, save_total_limit=None):
            return super()._finalize_training(*args, **kwargs)

    # Both write training_args.bin
    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        with temporarily(self.args, **pickled_without_credentials(self.args)):
            super()._save(output_dir, state_dict=state_dict)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        with temporarily(self.args, **pickled_without_credentials(self.args)):
            super()._push_from_checkpoint(checkpoint_folder)
