"""Saving and loading policy and critic: a folder that plain transformers or PEFT loads, and `critic/` beside it."""

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
    """Return the policy's or the critic's part of an actor-critic's gathered weights; None if none were gathered."""
    if state_dict is None:
        return None
    return {k.removeprefix(f"{role}."): v for k, v in state_dict.items() if k.startswith(f"{role}.")}


def save_critic(actor_critic: ActorCritic, folder: str, state_dict: dict[str, Tensor] | None = None) -> None:
    """Write the critic as a sequence classifier, or as the adapter of one; `state_dict` holds gathered weights."""
    weights, critic = weights_of("critic", state_dict), actor_critic.critic
    if actor_critic.shares_base:
        policy_weights = weights_of("policy", state_dict)
        save_classifier(actor_critic.policy, CRITIC, weights or critic.state_dict(), folder, policy_weights)
    else:
        critic.save_pretrained(folder, state_dict=weights)


def load_adapters(actor_critic: ActorCritic, folder: str) -> None:
    """Load the policy's and the critic's adapters, which the Trainer would load one of, and freeze."""
    if actor_critic.adapters is not None:
        load_adapter(actor_critic.policy, POLICY, folder)
    if actor_critic.shares_base:
        weights = load_adapter(actor_critic.policy, CRITIC, os.path.join(folder, "critic"))
        actor_critic.critic.score.load_state_dict(weights)


@contextmanager
def one_adapter(policy: Any) -> Iterator[None]:
    """Have PEFT save the policy's adapter alone: the critic's, the reference and reward models are no part of it."""
    if not hasattr(policy, "peft_config"):
        yield
        return
    policy.save_pretrained = partial(policy.save_pretrained, selected_adapters=[POLICY])
    try:
        yield
    finally:
        del policy.save_pretrained


def without_base(is_needed: bool) -> AbstractContextManager:
    """Have accelerate leave the frozen base out of an FSDP checkpoint, as it does for a bare PeftModel only."""
    return temporarily(fsdp_utils, is_peft_model=lambda model: True) if is_needed else nullcontext()
