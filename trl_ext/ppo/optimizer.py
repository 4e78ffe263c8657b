"""Check the optimizer that policy and critic share, and give the critic a learning rate of its own."""

import torch

from ..models.actor_critic import ActorCritic


def check_all_optimized(optimizer: torch.optim.Optimizer, actor_critic: ActorCritic) -> None:
    """Raise if a trainable weight is missing from the optimizer."""
    optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for role in ("policy", "critic"):
        missing = sum(p.requires_grad and id(p) not in optimized for p in actor_critic.parameters_of(role))
        if missing:
            raise ValueError(
                f"{missing} trainable weights of the {role} are not in the optimizer and would never change. Add them "
                "to the one passed in `optimizers`, or freeze them with `requires_grad_(False)`. For a critic that "
                "the trainer builds, pass `value_model`, or `optimizer_cls_and_kwargs` instead of `optimizers`."
            )


def set_critic_rate(optimizer: torch.optim.Optimizer, actor_critic: ActorCritic, rate: float) -> None:
    """Put the critic's weights into optimizer groups of their own, with the learning rate `rate`."""
    critic = {id(p) for p in actor_critic.parameters_of("critic")}
    for group in list(optimizer.param_groups):
        params = group["params"]
        group["params"] = [p for p in params if id(p) not in critic]
        options = {name: value for name, value in group.items() if name != "params"}
        optimizer.add_param_group({**options, "lr": rate, "params": [p for p in params if id(p) in critic]})
