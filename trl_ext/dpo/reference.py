"""Save and load the reference model, whose weights change in training with `sync_ref_model=True`."""

from typing import Any

import torch
from accelerate.utils import GatheredParameters
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from ..upstream.names import is_deepspeed_zero3_enabled


def save_reference(trainer: Any, path: str) -> None:
    """Write the reference's present weights to a file; every process must call this."""
    state = trainer.accelerator.get_state_dict(trainer.ref_model)
    if trainer.args.should_save:
        torch.save(state, path)


def load_reference(trainer: Any, path: str) -> None:
    """Load the reference's weights from a file; every process must call this."""
    reference = trainer.accelerator.unwrap_model(trainer.ref_model)
    state = torch.load(path, map_location="cpu", weights_only=True)
    if not is_deepspeed_zero3_enabled():
        set_model_state_dict(reference, state, options=StateDictOptions(full_state_dict=True))
        return
    with GatheredParameters(list(reference.parameters()), modifier_rank=0):
        if trainer.accelerator.is_main_process:
            reference.load_state_dict(state)
