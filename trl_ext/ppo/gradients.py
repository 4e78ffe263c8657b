"""Inspect and drop the gradients of a PPO step, when they are complete and not yet clipped."""

import os
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor


def drop(parameters: Any) -> None:
    """Remove the parameters' gradients, so that the optimizer skips the parameters in this step."""
    for parameter in parameters:
        parameter.grad = None


def norm_of(parameters: Any, scale: float = 1.0) -> Tensor | None:
    """Return the joint norm of the parameters' gradients, divided by the loss scale; None if none has a gradient."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not grads:
        return None
    norm: Any = torch.nn.utils.get_total_norm(grads)
    return (norm.full_tensor() if hasattr(norm, "full_tensor") else norm) / scale


def save_and_raise(trainer: Any, role: str) -> None:
    """Save the weights from before this step, then raise an error: the gradient of `role` is not finite."""
    folder = os.path.join(trainer.args.output_dir, "last-good")
    trainer.save_model(folder, _internal_call=True)
    trainer.accelerator.wait_for_everyone()  # raising on one process may end another that is still writing
    raise_not_finite(
        trainer,
        role,
        f"The weights from before this step are in {folder}. They are finite, but earlier steps may have hurt them.",
    )


def raise_not_finite(trainer: Any, whose: str, what_is_left: str) -> None:
    """Raise a `FloatingPointError` on all processes; it names the metrics that are not finite on some process."""
    terms = sorted(set(gather_object(trainer.metrics.not_finite())))
    cause = (
        f"first seen in {', '.join(terms)}" if terms else "every logged term is finite, so the backward pass caused it"
    )
    raise FloatingPointError(
        f"The gradient of the {whose} is not finite at step {trainer.state.global_step + 1} ({cause}). {what_is_left} "
        "Usual causes: a learning rate that is too high, fp16, or rewards on very different scales (see "
        "`reward_normalization`, `reward_clip_range`)."
    )
