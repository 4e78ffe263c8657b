"""Save the state that a PPO run needs to resume exactly, beside what the Trainer saves."""

import os
import pickle
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Snapshot:
    """Hold one process' state between two optimizer steps, as plain data and CPU tensors."""

    step: int  # micro-batches trained on
    skip_until: int  # `step` at which updates begin again after `max_approx_kl` has stopped them
    rollout: dict[str, Tensor] | None  # the rows that are being trained on, in the order of generation
    kl_controller: dict[str, Any]
    reward_normalizer: dict[str, Any]
    metrics: dict[str, Any]
    trl_metrics: dict[str, list[float]]  # what TRL's own code has noted since the last log
    # The Trainer itself would start its loss sums anew, and the first log after resuming would cover fewer steps
    tr_loss: Tensor
    total_loss: float
    last_logged: int
    environments: dict[str, dict[str, list[Any]]] = field(default_factory=dict)  # states, by pool and environment name
    baseline_gate: dict[str, Any] = field(default_factory=dict)  # empty in checkpoints from before there was a gate

    @classmethod
    def take(cls, trainer: Any, rollout: dict[str, Tensor] | None) -> "Snapshot":
        """Copy the state of a trainer; `rollout` is None between two rollouts."""
        return cls(
            step=trainer._step,
            skip_until=trainer._skip_until,
            rollout=None if rollout is None else {name: values.cpu() for name, values in rollout.items()},
            kl_controller=trainer.kl_controller.state_dict(),
            reward_normalizer=trainer.reward_normalizer.state_dict(),
            metrics=trainer.metrics.state_dict(),
            trl_metrics=dict(trainer._metrics["train"]),
            tr_loss=trainer._tr_loss.cpu(),
            total_loss=trainer._total_loss_scalar,
            last_logged=trainer._globalstep_last_logged,
            environments=trainer._environment_states(),
            baseline_gate=trainer.baseline_gate.state_dict(),
        )

    def restore(self, trainer: Any) -> dict[str, Tensor] | None:
        """
        Put this state into a trainer.

        Returns:
            The rows of the rollout that was being trained on; None if the state is from between two rollouts.
        """
        device = trainer.args.device
        trainer._step, trainer._skip_until = self.step, self.skip_until
        trainer.kl_controller.load_state_dict(self.kl_controller)
        trainer.reward_normalizer.load_state_dict(self.reward_normalizer)
        trainer.metrics.load_state_dict(self.metrics)
        trainer._metrics["train"].update(self.trl_metrics)
        trainer._tr_loss = self.tr_loss.to(device)
        trainer._total_loss_scalar, trainer._globalstep_last_logged = self.total_loss, self.last_logged
        trainer._load_environments(self.environments)
        if self.baseline_gate:
            trainer.baseline_gate.load_state_dict(self.baseline_gate)
        return self.rollout and {name: values.to(device) for name, values in self.rollout.items()}

    def save(self, checkpoint: str, process: int) -> None:
        path = snapshot_file(checkpoint, process)
        torch.save(vars(self), path)
        if self.environments:  # what users' classes return
            try:
                torch.load(path, map_location="cpu", weights_only=True)
            except pickle.UnpicklingError as error:
                reason = " ".join(str(error).split())[:200]
                raise ValueError(
                    f"`_state_dict` of an environment must return plain values or tensors ({reason}): "
                    "turn other objects into lists, dicts, numbers or text."
                ) from error

    @classmethod
    def load(cls, checkpoint: str, process: int) -> "Snapshot":
        path = snapshot_file(checkpoint, process)
        try:
            return cls(**torch.load(path, map_location="cpu", weights_only=True))
        except TypeError as error:
            raise ValueError(
                f"{path} was written by another version of trl_ext ({error}): resume with that version, or start anew."
            ) from error


def snapshot_file(checkpoint: str, process: int) -> str:
    return os.path.join(checkpoint, f"ppo_state_{process}.pt")
