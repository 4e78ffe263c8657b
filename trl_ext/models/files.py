"""Save and load policy and critic: the policy in a folder for transformers or PEFT, the critic in `critic/` within."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from accelerate.utils import fsdp_utils
from torch import Tensor

from ..upstream.temporarily import temporarily
from .actor_critic import ActorCritic
from .adapter_switch import CRITIC, POLICY
from .adapters import load_adapter, save_classifier


def weights_of(role: str, state_dict: dict[str, Tensor] | None) -> dict[str, Tensor] | None:
    """Return the weights of "policy" or "critic" (`role`) in an actor-critic's state; None if `state_dict` is None."""
    if state_dict is None:
        return None
    return {k.removeprefix(f"{role}."): v for k, v in state_dict.items() if k.startswith(f"{role}.")}


def save_critic(actor_critic: ActorCritic, folder: str, state_dict: dict[str, Tensor] | None = None) -> None:
    """
    Save the critic: as an adapter if it shares the policy's base, else as a sequence classifier.

    `state_dict` holds the actor-critic's gathered weights, if they are sharded.
    """
    weights, critic = weights_of("critic", state_dict), actor_critic.critic
    if actor_critic.shares_base:  # then `weights` has the critic's head; the critic's adapter is in the policy
        policy_weights = weights_of("policy", state_dict)
        save_classifier(actor_critic.policy, CRITIC, weights or critic.state_dict(), folder, policy_weights)
    else:
        critic.save_pretrained(folder, state_dict=weights)


def load_adapters(actor_critic: ActorCritic, folder: str) -> None:
    """
    Load the adapters of policy and critic from `folder`, and the head of a critic that shares the policy's base.

    Transformers' Trainer would load only the policy's adapter, and freeze it.
    """
    if actor_critic.adapters is not None:
        load_adapter(actor_critic.policy, POLICY, folder)
    if actor_critic.shares_base:
        weights = load_adapter(actor_critic.policy, CRITIC, os.path.join(folder, "critic"))
        actor_critic.critic.score.load_state_dict(weights)


@contextmanager
def one_adapter(policy: Any) -> Iterator[None]:
    """Let PEFT save only the policy's adapter within the block, and no adapter of critic, reference or rewards."""
    if not hasattr(policy, "peft_config"):
        yield
        return
    policy.save_pretrained = partial(policy.save_pretrained, selected_adapters=[POLICY])
    try:
        yield
    finally:
        del policy.save_pretrained


def without_base(is_needed: bool) -> AbstractContextManager:
    """
    Return a context in which accelerate leaves the frozen base out of an FSDP checkpoint, if `is_needed`.

    Otherwise accelerate does so only for a PeftModel.
    """
    return temporarily(fsdp_utils, is_peft_model=lambda model: True) if is_needed else nullcontext()
