"""Which checkpoints can be trusted, and whether they belong to this run: the same for every trainer."""

import json
import os
import time
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers import TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput

from .halts import Halting, Rollback, forget_rollback, rolled_back
from .temporarily import temporarily
from .upstream import is_deepspeed_zero3_enabled, rotate_checkpoints, sort_checkpoints

MARKER = "trl_ext_complete.json"  # written last: a checkpoint without it was interrupted

# Fields that may differ between a run and its continuation: they change what is shown, kept or how fast it goes
_MAY_DIFFER = (
    "dataloader_",
    "dataset_num_proc",
    "ddp_",
    "debug",
    "disable_tqdm",
    "distribution_shift_",
    "do_",
    "enable_jit",
    "eval_",
    "greater_is_better",
    "hub_",
    "load_best",
    "local_rank",
    "log_",
    "logging_",
    "metric_for",
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


class RolledBack(CannotResume):
    """A monitor rolled the run back, and nothing has been changed since."""


def fingerprint(args: TrainingArguments, **facts: Any) -> dict[str, Any]:
    """What must be equal for a run to be continued exactly."""
    config = {name: value for name, value in args.to_dict().items() if not name.startswith(_MAY_DIFFER)}
    return json.loads(json.dumps({**config, **facts}, default=str))


def write_marker(checkpoint: str, contents: dict[str, Any], processes: int) -> None:
    temporary = Path(checkpoint) / f"{MARKER}.tmp"
    # The time is kept within: a copied folder's files have the time of the copy
    marker = {"written_ns": time.time_ns(), "processes": processes, "configuration": contents}
    temporary.write_text(json.dumps(marker, indent=2))
    os.replace(temporary, Path(checkpoint) / MARKER)


def read_marker(checkpoint: str) -> dict[str, Any] | None:
    """`configuration`, `processes` and `written_ns` of a complete checkpoint, None for one that was not finished."""
    marker = Path(checkpoint) / MARKER
    return json.loads(marker.read_text()) if marker.is_file() else None


def newest_complete(output_dir: str) -> tuple[str | None, list[str]]:
    """The complete checkpoint in `output_dir` that was finished last, and those that are not complete."""
    if not any(Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")):
        return None, []
    markers = {checkpoint: read_marker(checkpoint) for checkpoint in sort_checkpoints(output_dir)}
    complete = {checkpoint: marker["written_ns"] for checkpoint, marker in markers.items() if marker is not None}
    rollback = Rollback.read(output_dir)
    good = {c: written for c, written in complete.items() if rollback is None or not rollback.excludes(c, written)}
    return max(good, key=good.__getitem__, default=None), [c for c in markers if c not in complete]


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [f"{name}: {a.get(name)!r} → {b.get(name)!r}" for name in sorted({*a, *b}) if a.get(name) != b.get(name)]


def newest_checkpoint(output_dir: str) -> str | None:
    """The complete checkpoint in `output_dir` that was finished last, if there is one; says which ones it skips."""
    checkpoint, skipped = newest_complete(output_dir)
    for path in skipped:
        PartialState().print(
            f"Skipping {path}: it is not complete (interrupted while it was written, or `save_only_model`)."
        )
    return checkpoint


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
    refused with their names, unless `resume_anyway` is set. A run that is complete, or that a monitor stopped, is
    loaded and not trained again. One that a monitor rolled back is refused until a setting is changed, unless
    `resume_from_checkpoint=False` says to begin anew all the same.

    Args:
        run_facts: what else must be equal for a run to go on, beside the trainer's arguments: JSON by name.
        *args, **kwargs: the trainer's own.
    """

    args: Any
    accelerator: Any
    state: Any
    train_dataset: Any

    def __init__(self, *args: Any, run_facts: dict[str, Any] | None = None, **kwargs: Any):
        self._given_facts = run_facts or {}
        self._settings: dict[str, Any] = {}  # of this run, taken when training starts
        self._given: list[dict[str, Any]] = []  # the options of the optimizer's groups, as the arguments say
        super().__init__(*args, **kwargs)

    # ---- What a trainer adds ----

    def _run_facts(self) -> dict[str, Any]:
        """What must be equal for a run to go on exactly, beside its arguments; JSON."""
        rows = {"train_rows": len(self.train_dataset)} if hasattr(self.train_dataset, "__len__") else {}
        return {**rows, **self._given_facts}

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
        facts = [self._run_facts()]
        broadcast_object_list(facts)  # FSDP may load weights on the first process alone
        self._settings = fingerprint(self.args, **facts[0])
        halting = [c for c in self.callback_handler.callbacks if isinstance(c, Halting)]  # type: ignore[attr-defined]
        for callback in halting:
            callback.run_facts = facts[0]
        self._check_rollback(resume_from_checkpoint, halting)
        checkpoint = self._find_checkpoint(resume_from_checkpoint)
        if checkpoint is None:
            return self._unless_rolled_back(super().train(**kwargs))  # type: ignore[misc]
        state = TrainerState.load_from_json(os.path.join(checkpoint, "trainer_state.json"))
        is_same = not self._differences(checkpoint)
        stops = [stop for callback in halting if (stop := callback.stop_that_holds(self.args, state))]
        if is_same and (stops or state.global_step >= state.max_steps):
            end = "; ".join(stops) if stops else f"Training is complete, at step {state.global_step}"
            if is_deepspeed_zero3_enabled():
                raise CannotResume(
                    f"{end}, and ZeRO-3 loads weights only into a run that goes on: take them from {checkpoint}."
                )
            self.accelerator.print(f"{end}: loading {checkpoint}.")
            self._load_from_checkpoint(checkpoint)  # type: ignore[attr-defined]
            self._load_own_state(checkpoint)
            self.state = state
            if self.args.load_best_model_at_end and state.best_model_checkpoint is not None:
                self._load_best_model()  # type: ignore[attr-defined]
            return TrainOutput(state.global_step, float("nan"), {})
        self._before_resuming(checkpoint)
        self._load_own_state(checkpoint)
        self.accelerator.print(f"Resuming from {checkpoint}, step {state.global_step} of {state.max_steps}.")
        return self._unless_rolled_back(super().train(resume_from_checkpoint=checkpoint, **kwargs))  # type: ignore[misc]

    def _check_rollback(self, resume: str | bool | None, halting: list[Halting]) -> None:
        """Raise if a run that was rolled back would begin again as it was; `False` begins it anew all the same."""
        if resume is False:
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                forget_rollback(self.args.output_dir)
            self.accelerator.wait_for_everyone()
        found = [Rollback.read(self.args.output_dir)]
        broadcast_object_list(found)
        if (rollback := found[0]) is None:
            return
        held = [callback.rollback_that_holds(self.args, rollback, bool(resume)) for callback in halting]
        if sentence := next(filter(None, held), None):
            raise RolledBack(sentence)
        changed = differences(rollback.settings, self._settings) or [f"other settings of {rollback.monitor}"]
        self.accelerator.print(f"Going on after the rollback at step {rollback.step}, with {'; '.join(changed)}.")

    def _unless_rolled_back(self, output: TrainOutput) -> TrainOutput:
        if sentence := rolled_back(self.state):
            raise RolledBack(sentence)  # a script that went on would save the weights as if they were good
        return output

    def _find_checkpoint(self, resume: str | bool | None) -> str | None:
        if resume is None or resume is False:
            return None
        checkpoint = newest_checkpoint(self.args.output_dir) if resume is True else str(resume)
        if checkpoint is None:
            raise CannotResume(f"No complete checkpoint in {self.args.output_dir}, so there is nothing to resume.")
        if not os.path.isdir(checkpoint):
            raise CannotResume(f"{checkpoint} is no folder, so there is nothing to resume from: check the path.")
        marker = read_marker(checkpoint)
        if marker is None:
            raise CannotResume(
                f"{checkpoint} is not a complete checkpoint (it has no {MARKER}): it was interrupted while it was "
                "written, or trl_ext did not write it. Pass another one, or `True` for the newest complete one."
            )
        self._check_marker(checkpoint, marker)
        different = self._differences(checkpoint)
        rollback = Rollback.read(self.args.output_dir)  # changing a setting is what it asks for
        is_asked = rollback is not None and rollback.is_before(checkpoint)
        if different and not is_asked and not getattr(self.args, "resume_anyway", False):
            way_out = ", or set `resume_anyway=True` to go on from it all the same"
            raise CannotResume(
                f"{checkpoint} belongs to another configuration ({'; '.join(different)}). Use the settings that it "
                "was written with, or choose another `output_dir` to start anew"
                f"{way_out if hasattr(self.args, 'resume_anyway') else ''}."
            )
        return checkpoint

    def _differences(self, checkpoint: str) -> list[str]:
        return differences((read_marker(checkpoint) or {}).get("configuration", {}), self._settings)

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        scheduler = super().create_scheduler(*args, **kwargs)  # type: ignore[misc]
        # As the arguments say: a checkpoint's optimizer brings its own, learning rate and all
        groups = self.optimizer.param_groups  # type: ignore[attr-defined]
        self._given = [{name: group[name] for name in group if name != "params"} for group in groups]
        return scheduler

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        groups = self.optimizer.param_groups  # type: ignore[attr-defined]
        if checkpoint is None or not self._differences(checkpoint) or len(groups) != len(self._given):
            return
        for group, given in zip(groups, self._given, strict=True):
            before, now = group.get("initial_lr"), given.get("initial_lr")
            group.update({name: value for name, value in given.items() if name != "lr"})
            if before and now is not None:  # the schedule's factor of this step is kept
                group["lr"] *= now / before
        scheduler = self.lr_scheduler.state_dict()  # type: ignore[attr-defined]
        if "base_lrs" in scheduler and all("initial_lr" in group for group in groups):
            rates = {"base_lrs": [g["initial_lr"] for g in groups], "_last_lr": [g["lr"] for g in groups]}
            self.lr_scheduler.load_state_dict(scheduler | rates)  # type: ignore[attr-defined]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if rolled_back(self.state):
            return
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
                forget_rollback(run_dir)
            rotate_checkpoints(
                output_dir=run_dir,
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )
