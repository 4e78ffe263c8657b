"""Check a PPO step's gradients before they are clipped, and set up the optimizer that policy and critic share."""

from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from ..models.actor_critic import ActorCritic
from .metrics import Accumulator


def drop(parameters: Any) -> None:
    """Set the parameters' gradients to None, so that the optimizer skips the parameters in this step."""
    for parameter in parameters:
        parameter.grad = None


def norm_of(parameters: Any, scale: float = 1.0) -> Tensor | None:
    """Return the norm of all gradients, divided by `scale`, fp16's loss scale; None if no parameter has a gradient."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not grads:
        return None
    norm: Any = torch.nn.utils.get_total_norm(grads)
    return (norm.full_tensor() if hasattr(norm, "full_tensor") else norm) / scale


def raise_not_finite(whose: str, metrics: Accumulator, step: int, what_is_left: str) -> None:
    """
    Raise a `FloatingPointError` on all processes; name the metrics that are NaN or infinite on at least one process.

    Args:
        whose: what has the gradient, such as "policy".
        step: optimizer step, from 1.
        what_is_left: a sentence for the message on where usable weights may be.
    """
    terms = sorted(set(gather_object(metrics.not_finite())))
    cause = (
        f"seen also in {', '.join(terms)}" if terms else "every logged term is finite, so the backward pass caused it"
    )
    raise FloatingPointError(
        f"The gradient of the {whose} is not finite at step {step} ({cause}). {what_is_left} "
        "Usual causes: steps that are too large (lower `step_kl_target`, or the learning rate if it is 0), fp16, "
        "or rewards on very different scales (see `reward_normalization`, `reward_clip_range`)."
    )


def check_all_optimized(optimizer: torch.optim.Optimizer, actor_critic: ActorCritic) -> None:
    """Raise a `ValueError` if a trainable weight of `actor_critic` is missing from the optimizer."""
    optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for role in ("policy", "critic"):
        missing = sum(p.requires_grad and id(p) not in optimized for p in actor_critic.parameters_of(role))
        if missing:
            raise ValueError(
                f"{missing} trainable weights of the {role} are not in the optimizer and would never change. Add them "
                "to the optimizer passed in `optimizers`, or freeze them with `requires_grad_(False)`. For a critic "
                "that the trainer builds, leave `optimizers` out, or build the critic yourself (`value_model`)."
            )


def set_critic_rate(optimizer: torch.optim.Optimizer, actor_critic: ActorCritic, rate: float | None) -> None:
    """
    Put the weights of the critic in `actor_critic` into separate groups of the optimizer, with the learning rate
    `rate`; None keeps the present rate.
    """
    critic = {id(p) for p in actor_critic.parameters_of("critic")}
    for group in list(optimizer.param_groups):
        params = group["params"]
        group["params"] = [p for p in params if id(p) not in critic]
        options = {name: value for name, value in group.items() if name != "params"}
        options["lr"] = group["lr"] if rate is None else rate
        optimizer.add_param_group({**options, "params": [p for p in params if id(p) in critic]})
    # FSDP2 cannot load a checkpoint with several empty groups
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
