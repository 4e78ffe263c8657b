"""Pass requests of callbacks, such as to stop, to the trainers of all processes."""

from typing import Any

import torch

_REQUESTS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
_KL_SCALE = "trl_ext_kl_scale"  # the key of a pending request in `TrainerState.stateful_callbacks`


class AgreedControl:
    """
    Extend a trainer: if a callback on one process requests something, all processes do it at the same step.

    All requests in [`~transformers.TrainerControl`] that are made at the end of a step or an epoch are shared. Of
    requests that are made while the trainer logs, evaluates or saves, only requests to stop are shared.

    Without this class, a time limit that runs out on one process first would leave the other processes waiting in the
    next collective for ever.
    """

    accelerator: Any
    control: Any

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        is_asked = self._agree()
        super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]
        if is_asked:
            self._agree()

    def _agree(self) -> bool:
        """Make a request of any process a request on all processes; return whether there is any request."""
        asked = [getattr(self.control, name) for name in _REQUESTS]
        if self.accelerator.num_processes > 1:
            everyones = torch.tensor(asked, dtype=torch.int32, device=self.accelerator.device)
            asked = (self.accelerator.reduce(everyones, reduction="sum") > 0).tolist()
            for name, value in zip(_REQUESTS, asked, strict=True):
                setattr(self.control, name, value)
        return any(asked)


def request_kl_scale(state: Any, factor: float) -> None:
    """
    Ask the trainer to multiply its KL coefficient by `factor` once, at its next rollout. Only PPOTrainer does so.

    The request is kept in `state`, so that a resumed run answers it, too. If several requests are made before a
    rollout, only the largest factor is used. Call this on all processes.

    Args:
        state: the [`~transformers.TrainerState`] that callbacks are given.
        factor: number above 0, dimensionless.
    """
    asked = state.stateful_callbacks.setdefault(_KL_SCALE, {"factor": factor, "step": state.global_step})
    asked["factor"] = max(asked["factor"], factor)


def kl_scale_is_pending(state: Any, steps: int) -> bool:
    """Return whether a request to scale the KL coefficient has waited for `steps` optimizer steps or more."""
    asked = state.stateful_callbacks.get(_KL_SCALE)
    return asked is not None and state.global_step - asked["step"] >= steps


def take_kl_scale(state: Any) -> float:
    """Return the factor that callbacks requested for the KL coefficient, and forget it; 1.0 without a request."""
    return state.stateful_callbacks.pop(_KL_SCALE, {"factor": 1.0})["factor"]
