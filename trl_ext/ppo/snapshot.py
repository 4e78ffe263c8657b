"""Save the state that a PPO run needs to resume exactly, beside what the Trainer saves."""

import os
from typing import Any

import torch

_PARTS = ("kl_controller", "reward_normalizer", "baseline_gate", "metrics")  # of a trainer, each with a `state_dict`


def save_state(trainer: Any, checkpoint: str) -> None:
    """Save the state of this process into a checkpoint."""
    # In the middle of a rollout only the end of a run is saved: what resumes it samples the rollout again
    begin = trainer._step - trainer._step % trainer._steps_per_rollout
    state = {
        "step": begin,  # micro-batches trained on
        **{name: getattr(trainer, name).state_dict() for name in _PARTS},
        "trl_metrics": dict(trainer._metrics["train"]),  # what TRL's own code has noted since the last log
        # The Trainer itself would start its loss sums anew, and the first log after resuming would cover fewer steps
        "tr_loss": trainer._tr_loss.cpu(),
        "total_loss": trainer._total_loss_scalar,
        "last_logged": trainer._globalstep_last_logged,
        "environments": trainer._environment_states(),
    }
    path = _file(trainer, checkpoint)
    torch.save(state, path)
    if state["environments"]:  # what users' classes return: whatever cannot be loaded is refused now
        torch.load(path, map_location="cpu", weights_only=True)


def load_state(trainer: Any, checkpoint: str) -> None:
    """Put the state that this process has saved into a trainer."""
    state = torch.load(_file(trainer, checkpoint), map_location="cpu", weights_only=True)
    trainer._step = state["step"]
    for name in _PARTS:
        getattr(trainer, name).load_state_dict(state[name])
    trainer._metrics["train"].update(state["trl_metrics"])
    trainer._tr_loss = state["tr_loss"].to(trainer.args.device)
    trainer._total_loss_scalar, trainer._globalstep_last_logged = state["total_loss"], state["last_logged"]
    trainer._load_environments(state["environments"])


def _file(trainer: Any, checkpoint: str) -> str:
    return os.path.join(checkpoint, f"ppo_state_{trainer.args.process_index}.pt")
