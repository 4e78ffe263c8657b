"""Update the reference towards the policy's weights in training, as `sync_ref_model` asks."""

import os
from typing import Any

from ..runs.checkpoints import CannotResume
from ..upstream.names import SyncRefModelCallback

_FOLDER = "reference"


class SyncReference(SyncRefModelCallback):
    """Update the reference from the policy's weights; TRL's own callback would read the critic's weights, too."""

    def on_step_end(self, args, state, control, **kwargs):
        kwargs["model"] = self.accelerator.unwrap_model(kwargs["model"]).policy
        super().on_step_end(args, state, control, **kwargs)


def save_reference(trainer: Any, checkpoint: str) -> None:
    """Save the updated reference into a checkpoint; every process must call this."""
    state = trainer.accelerator.get_state_dict(trainer.ref_model)
    if trainer.args.should_save:
        reference = trainer.accelerator.unwrap_model(trainer.ref_model)
        reference.save_pretrained(os.path.join(checkpoint, _FOLDER), state_dict=state)


def moved_reference(checkpoint: str) -> str:
    """Return the folder in a checkpoint that holds the updated reference; raise [`CannotResume`] if it is missing."""
    folder = os.path.join(checkpoint, _FOLDER)
    if not os.path.isdir(folder):
        raise CannotResume(
            f"{folder} is missing: the checkpoint was written without the reference that `sync_ref_model=True` moves. "
            "Resume with `sync_ref_model=False`, or start anew."
        )
    return folder
