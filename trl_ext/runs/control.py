"""Share callbacks' requests among processes, and record that a monitor ended a run."""

import json
from itertools import compress
from pathlib import Path
from typing import Any

import torch

from .files import whole_file

_STOPS = ("should_training_stop", "should_epoch_stop")
_REQUESTS = (*_STOPS, "should_save", "should_evaluate", "should_log")
_KL_SCALE, _RATE_SCALE = "trl_ext_kl_scale", "trl_ext_rate_scale"  # pending requests in `state.stateful_callbacks`


# ---- Requests of callbacks ----


class AgreedControl:
    """
    Extend a trainer: if a callback on one process makes a request, all processes carry it out at the same step.

    All requests in [`~transformers.TrainerControl`] that are made at the end of a step or an epoch are shared. Of
    requests that are made while the trainer logs, evaluates or saves, only requests to stop are shared.

    Without this class, a time limit that is reached on one process first would leave the other processes waiting in
    the next collective forever.
    """

    accelerator: Any
    args: Any
    control: Any
    _waiting: set[str]  # requests that were put off, fields of `control`; `ResumableRun.train` sets it

    @property
    def _must_wait(self) -> bool:
        """Override to put off requests to stop and to save: they are granted as soon as this is False."""
        return False

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        deferred = {*_STOPS, "should_save"}
        if self.args.load_best_model_at_end or self.args.save_strategy == "best":
            deferred.add("should_evaluate")  # it says whether the checkpoint is the best one
        is_asked = self._agree(deferred)
        super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]
        if is_asked:
            self._agree({*_STOPS})  # of callbacks that were called in between

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self._must_wait:  # a callback has asked for it since the step ended
            self._waiting.add("should_save")
        else:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]

    def _agree(self, deferred: set[str]) -> bool:
        """Share what any process requests, put off what is `deferred` and must wait; return whether any is left."""
        asked = [getattr(self.control, name) or name in self._waiting & deferred for name in _REQUESTS]
        if self.accelerator.num_processes > 1:
            everyones = torch.tensor(asked, dtype=torch.int32, device=self.accelerator.device)
            asked = (self.accelerator.reduce(everyones, reduction="sum") > 0).tolist()
        requests = set(compress(_REQUESTS, asked))
        put_off = requests & deferred if self._must_wait else set()
        self._waiting = self._waiting - deferred | put_off
        for name in _REQUESTS:
            setattr(self.control, name, name in requests - put_off)
        return requests != put_off


def request_kl_scale(state: Any, factor: float) -> None:
    """
    Ask the trainer to multiply its KL coefficient by `factor` once, at its next rollout. Only PPOTrainer does so, and
    keeps within `kl_coef_max`.

    The request is kept in `state`, so that a resumed run carries it out, too. If several requests are made before a
    rollout, only the largest factor is used. Call this on all processes.

    Args:
        state: the [`~transformers.TrainerState`] that callbacks are given.
        factor: number above 0, dimensionless.
    """
    asked = state.stateful_callbacks.setdefault(_KL_SCALE, {"factor": factor})
    asked["factor"] = max(asked["factor"], factor)


def take_kl_scale(state: Any) -> float:
    """Return the factor that callbacks requested for the KL coefficient (1.0 if none), and clear the request."""
    return state.stateful_callbacks.pop(_KL_SCALE, {"factor": 1.0})["factor"]


def request_rate_scale(state: Any, factor: float) -> None:
    """
    Ask the trainer to multiply its learning rates by `factor` from its next rollout on. Only PPOTrainer does so.

    If the rates follow `step_kl_target`, the target is multiplied by `factor`² instead. If several requests are made
    before a rollout, only the smallest factor is used. Call this on all processes, with the callbacks' `state`.
    """
    asked = state.stateful_callbacks.setdefault(_RATE_SCALE, {"factor": factor})
    asked["factor"] = min(asked["factor"], factor)


def take_rate_scale(state: Any) -> float:
    """Return the factor that callbacks requested for the learning rates (1.0 if none), and clear the request."""
    return state.stateful_callbacks.pop(_RATE_SCALE, {"factor": 1.0})["factor"]


# ---- The record of a stop, which outlives the process ----

STOPPED = "stopped.json"
_SAVING_FORBIDDEN = "trl_ext_saving_forbidden"  # in `TrainerState.stateful_callbacks`: the weights are not to be saved


class CannotResume(ValueError):
    """
    Raised when a run cannot resume: a checkpoint is missing or incomplete, something has changed that must stay the
    same (see [`~trl_ext.runs.checkpoints.ResumableRun`]), a monitor ended the run, or it is complete and uses ZeRO-3.
    """


class Stopped(CannotResume):
    """
    Raised when a run that a monitor ended is started again, with neither `resume_anyway` nor
    `resume_from_checkpoint=False`.

    Also raised at the end of training, if a monitor ended the run because its weights must not be saved.
    """


def write_stop(output_dir: str, monitor: str, step: int, what: str) -> None:
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    with whole_file(Path(output_dir, STOPPED), durably=True) as temporary:
        temporary.write_text(json.dumps({"monitor": monitor, "step": step, "what": what}, indent=2))


def delete_stop(output_dir: str) -> None:
    if Path(output_dir, STOPPED).is_file():  # `output_dir` may be a file, which another check reports
        Path(output_dir, STOPPED).unlink(missing_ok=True)


def read_stop(output_dir: str, how: str) -> str | None:
    """
    Return which monitor ended the run in `output_dir`, when and why, as text that ends in "To continue, {how}"; None
    if no monitor ended it.
    """
    record = Path(output_dir, STOPPED)
    if not record.is_file():
        return None
    try:
        stop = json.loads(record.read_text())
        reported = f"{stop['monitor']} ended this run at step {stop['step']} ({stop['what']})"
    except (ValueError, KeyError, TypeError):
        reported = "A monitor ended this run"
    return f"{reported}, see alerts.jsonl in {output_dir}. To continue, {how}"


def forbid_saving(state: Any, sentence: str) -> None:
    """Mark in a trainer's `state` that the weights must not be saved; `sentence` says why."""
    state.stateful_callbacks[_SAVING_FORBIDDEN] = {"sentence": sentence}


def saving_forbidden(state: Any) -> str | None:
    """Return the reason that [`forbid_saving`] stored in a trainer's `state`; None if the weights may be saved."""
    found = state.stateful_callbacks.get(_SAVING_FORBIDDEN)
    return found and found["sentence"]
