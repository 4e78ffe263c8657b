"""Make the reference, critic and reward models: each is a separate model or an adapter on the policy's base."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from peft import LoraConfig, PeftModel
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

from ..models.actor_critic import ActorCritic, AdapterClassifier, check_critic, critic_from_policy, zero_
from ..models.adapters import (
    CRITIC,
    POLICY,
    REFERENCE,
    AdapterSwitch,
    add_critic,
    add_saved,
    check_config,
    check_modules,
    check_same_base,
    copy_adapter,
    merge_exactly,
    prepare_peft_model,
)
from ..models.generation import forked_rng
from ..models.lm_head import add_dense_lm_head
from ..models.loading import Loader, is_adapter, load_merged, load_separately, load_tokenizer
from ..models.weights import (
    base_model_of,
    check_same_ids,
    disable_dropout,
    hub_identity,
    unpatched_copy,
    unwrapped,
    vocabulary_of,
)
from ..rewards.member import checked_name, distinct
from ..rewards.model import ModelReward, load_classifier, load_reward_model, logits_of, same_tokenizer
from ..upstream.names import add_fused_lm_head, create_model_from_path, get_config_model_id, is_deepspeed_zero3_enabled
from ..upstream.statements import refuse
from .config import PPOConfig
from .reward_calls import AdapterReward, CheckedReward, DeferredErrors


def prepare_adapters(model: Any, value_model: Any, peft_config: Any, critic_peft_config: Any) -> None:
    """
    Raise a `ValueError` if `PPOTrainer`'s arguments for adapters contradict each other, or would train wrongly.

    If `model` is a PeftModel, make its adapter `default` trainable.
    """
    is_peft = peft_config is not None or isinstance(model, PeftModel)
    shares_base = value_model is None or is_adapter(value_model)
    if isinstance(model, PeftModel):
        prepare_peft_model(model, shares_base)
    elif is_peft:
        check_config(peft_config, "peft_config", shares_base)
    if critic_peft_config is not None and (not is_peft or value_model is not None):
        raise ValueError(
            "`critic_peft_config` is for a critic that shares the policy's base. It needs a policy with an adapter "
            "(`peft_config`), and no `value_model`."
        )


def load_reward_models(reward_funcs: list, tokenizers: list, args: PPOConfig) -> None:
    """
    Replace each path in the list `reward_funcs` by the reward model at that path; raise a `ValueError` if the model
    has no head. The path of an adapter is replaced by an [`AdapterReward`].

    Where `tokenizers` has None for a model that is loaded, load the model's tokenizer into `tokenizers`.
    """
    kwargs = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
    kwargs.pop("revision", None)  # it is the policy's
    if args.world_size > 1 or args.deepspeed_plugin is not None:
        kwargs["device_map"] = None
    for i, path in enumerate(reward_funcs):
        if is_adapter(path):
            reward_funcs[i] = AdapterReward(path)
        elif isinstance(path, str):
            reward_funcs[i] = load_reward_model(path, **kwargs)
            if tokenizers[i] is None:
                tokenizers[i] = AutoTokenizer.from_pretrained(path, trust_remote_code=kwargs["trust_remote_code"])


def check_base(policy: Any, accelerator: Any, use_vllm: bool) -> None:
    """
    Raise a `ValueError` for a policy with adapters that would train wrongly without an error: with adapters on
    embeddings or LM head, with FSDP's own activation checkpointing, or with vLLM on a quantised base.
    """
    check_modules(policy, "peft_config")
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    refuse(
        (
            plugin is not None and plugin.activation_checkpointing,
            "FSDP's own activation checkpointing computes layers again in `backward`, with the adapter that is active "
            "then, so gradients would be wrong. Set `fsdp_activation_checkpointing: false` in accelerate's "
            "configuration and `activation_checkpointing: true` in the training arguments.",
        ),
        (
            use_vllm and getattr(base_model_of(policy).config, "quantization_config", None) is not None,
            "`use_vllm=True` does not work with a quantised base: vLLM would get merged weights that were quantised "
            "again, and sample from another policy than the trained one. Load the base unquantised, or leave out "
            "`use_vllm`.",
        ),
    )


def pin_reference(policy: Any, use_vllm: bool) -> None:
    """
    Copy the policy's adapter to the reference's adapter, if there is one. With `use_vllm`, make sure that the base's
    weights stay the same when TRL merges the adapter for vLLM and unmerges it.
    """
    if use_vllm:
        merge_exactly(policy)
    for name, parameter in policy.named_parameters():
        # With a quantised base GRPO rounds the adapter to bfloat16, but not the copy of it that is the reference
        if f".{REFERENCE}." in name:
            parameter.data = policy.get_parameter(name.replace(f".{REFERENCE}.", f".{POLICY}.")).data.clone()


def make_reference(loader: Loader, ref_model: Any, args: PPOConfig, tokenizer: Any) -> Any:
    """
    Return the frozen reference model, before it is moved to its device.

    `loader` holds the policy. `ref_model` is a path or an object; None copies the policy with its present weights.
    `tokenizer` is the policy's. Raise a `ValueError` if the reference has fewer embeddings than the policy, or if it
    has more and was saved with other token ids.
    """
    if isinstance(ref_model, str):
        load = load_merged if is_adapter(ref_model) else create_model_from_path
        reference = load(ref_model, **loader.kwargs)
    elif ref_model is None:
        reference = unpatched_copy(loader.policy, "the reference", loader.reloader(create_model_from_path))
    else:
        reference = ref_model
    if vocabulary_of(reference) < vocabulary_of(loader.policy):
        raise ValueError(
            f"`ref_model` has embeddings for {vocabulary_of(reference)} tokens, but the policy may sample "
            f"{vocabulary_of(loader.policy)}, and the reference must score all of them. Leave `ref_model` "
            "out to use a frozen copy of the policy."
        )
    if vocabulary_of(reference) > vocabulary_of(loader.policy):
        check_same_ids("`ref_model`", path_of(ref_model), tokenizer)
    reference.requires_grad_(False).eval()
    if args.disable_dropout:
        disable_dropout(reference)
    add_fused_lm_head(reference, temperature=args.temperature)
    add_dense_lm_head(reference, args.temperature, args.logits_budget_gb)
    return reference


# ---- Reward models ----


class Rewards:
    """
    Hold a trainer's reward functions, in their order, and the tokenizers of those that are models.

    Args:
        functions: the reward functions and models, and an [`AdapterReward`] for each model saved as an adapter.
        tokenizers: one for each reward, None for functions.
        weights: one for each reward, 1 by default. A reward with weight 0 is only logged: it does not affect training.
    """

    def __init__(
        self,
        functions: list,
        tokenizers: list,
        names: list[str],
        policy_tokenizer: Any,
        weights: list[float] | None = None,
    ):
        self.functions = list(functions)
        self.only_measures = [weight == 0 for weight in weights or [1.0] * len(functions)]
        self.tokenizers = list(tokenizers)
        # Metrics are kept by name: two lambdas, or two models from folders of one name, would be merged
        self.names = distinct([name or f"reward_model_{i}" for i, name in enumerate(names)])
        self.policy_tokenizer = policy_tokenizer

    def load_adapters(self, loader: Loader, share: bool) -> dict[int, nn.Linear]:
        """
        Load the reward models that were saved as adapters.

        If `share` is True and the policy, which `loader` holds, has adapters, load them onto the policy's base. Else
        load each with a base of its own.

        Returns:
            The heads of the models that share the base, by the index of the reward.
        """
        heads = {}
        for i, reward in enumerate(self.functions):
            if not isinstance(reward, AdapterReward):
                continue
            if self.tokenizers[i] is None:
                self.tokenizers[i] = load_tokenizer(reward.path, trust_remote_code=loader.trust_remote_code)
            if self.tokenizers[i].pad_token_id is None:
                self.tokenizers[i].pad_token = self.tokenizers[i].eos_token
            # PEFT draws random weights before it loads the file's weights
            with forked_rng(loader.accelerator.device) if self.only_measures[i] else nullcontext():
                if share and isinstance(loader.policy, PeftModel):
                    heads[i] = _on_base(loader, f"reward_{i}", reward.path)
                else:
                    self.functions[i] = loader.placed(load_separately(reward.path, **loader.kwargs), shard=False)
        return heads

    def critic_candidates(self) -> list[int]:
        """
        Return the indices of the reward models that a critic may be copied from: those with the policy's tokenizer and
        a weight other than 0.
        """
        return [
            i
            for i, reward in enumerate(self.functions)
            if isinstance(reward, (nn.Module, AdapterReward))
            and not self.only_measures[i]
            and same_tokenizer(self.tokenizers[i], self.policy_tokenizer)
        ]

    def disable_dropout(self) -> None:
        for reward in self.functions:
            if isinstance(reward, nn.Module):
                disable_dropout(reward)

    def checked_functions(
        self,
        actor_critic: ActorCritic,
        args: PPOConfig,
        eos_token_ids: list[int],
        errors: DeferredErrors,
        forward: Callable,
        own_random_state: Callable[[], AbstractContextManager],
    ) -> list[Callable]:
        """
        Wrap each reward, models included, in a [`CheckedReward`].

        Args:
            actor_critic: holds the reward models that share the policy's base.
            forward: `forward(name, input_ids, attention_mask)` returns the (B,) scores of rows by the reward model
                `name`, which shares the policy's base. It runs the actor-critic inside its FSDP or DeepSpeed wrapper.
            own_random_state: makes a context with a separate random state. Functions of weight 0 run in this context,
                so that training samples as it would without them. They do not run in the background: a thread would
                use the generator that training uses.
        """
        result: list[Callable] = []
        for i, (reward, tokenizer, name) in enumerate(zip(self.functions, self.tokenizers, self.names, strict=True)):
            is_shared = isinstance(reward, AdapterReward)
            if is_shared or isinstance(reward, nn.Module):
                if is_shared:
                    score: Callable[..., Tensor] = partial(forward, f"reward_{i}")
                else:
                    reward.requires_grad_(False)
                    reward.eval()  # not chained: DeepSpeed's engine returns None here
                    score = partial(logits_of, reward)
                reward = ModelReward(
                    actor_critic.rewards[f"reward_{i}"] if is_shared else unwrapped(reward),
                    score=score,
                    tokenizer=tokenizer,
                    policy_tokenizer=self.policy_tokenizer,
                    eos_token_ids=eos_token_ids,
                    max_batch_tokens=None,
                    batch_size=args.local_rollout_forward_batch_size,
                    device=args.device,
                    chat_template_kwargs=args.chat_template_kwargs,
                    name=checked_name(None, name),  # a folder's name may have spaces
                )
            result.append(CheckedReward(reward, name, errors, own_random_state if self.only_measures[i] else None))
        return result


def _on_base(loader: Loader, name: str, path: str) -> nn.Linear:
    """Load a classifier's adapter onto the policy's base, which must be the adapter's own; return its head."""
    check_same_base(loader.policy, path, hub_identity(loader.path, loader.init_kwargs.get("revision")))
    return add_saved(loader.policy, name, path)


# ---- Critic ----


def make_actor_critic(
    loader: Loader,
    rewards: Rewards,
    heads: dict[int, nn.Linear],
    value_model: Any,
    critic_config: LoraConfig | None,
    has_critic: bool = True,
) -> tuple[ActorCritic, str]:
    """
    Put the policy, the critic, and the reward models that share the policy's base into one module.

    Args:
        loader: holds the policy.
        rewards, heads: all rewards, and the heads of the models that share the base, as `load_adapters` returns them.
        value_model: a path or an object; None makes the critic from a reward model or the policy.
        critic_config: configuration of the critic's adapter; None for that of the policy's adapter.
        has_critic: whether training uses a critic.

    Returns:
        The module, and a phrase for messages that says what its critic was made from.
    """
    policy = loader.policy
    critic = None
    head = None
    origin = "none"
    is_adapted = isinstance(policy, PeftModel)
    is_on_base = has_critic and is_adapted and (value_model is None or is_adapter(value_model))
    if has_critic and not is_on_base:
        critic, origin = make_critic(loader, rewards, value_model)
    if not is_adapted:
        return ActorCritic(policy, critic), origin
    if is_on_base:
        head, origin = add_critic_adapter(loader, rewards, heads, value_model, critic_config)
    adapters = AdapterSwitch(policy)  # now that all adapters are there
    on_base = partial(AdapterClassifier, policy, adapters)
    actor_critic = ActorCritic(
        policy,
        on_base(CRITIC, head) if is_on_base else critic,
        adapters,
        {f"reward_{i}": on_base(f"reward_{i}", head) for i, head in heads.items()},
    )
    actor_critic.train_adapters()
    if is_deepspeed_zero3_enabled() and actor_critic.shares_base:  # ZeRO-3 gathers parameters of one dtype only
        actor_critic.critic.score.to(next(p.dtype for p in policy.parameters() if p.requires_grad))
    return actor_critic, origin


def add_critic_adapter(
    loader: Loader, rewards: Rewards, heads: dict[int, nn.Linear], value_model: str | None, config: LoraConfig | None
) -> tuple[nn.Linear | None, str]:
    """
    Add the critic's adapter to the policy that `loader` holds. It is the first of these that exists:

    - the adapter at the path `value_model`;
    - a copy of the adapter of the first reward model that is on the policy's base, has the policy's tokenizer and a
      weight other than 0, and whose adapter has the rank, α and modules of `config`;
    - a new adapter with the settings `config`.

    Args:
        loader: holds the policy.
        heads: the heads of the reward models on the policy's base, by the index of the reward.
        value_model: path of an adapter that was trained as a classifier; None for none.
        config: settings of the critic's adapter; None for those of the policy's adapter.

    Returns:
        The critic's head, None for a head of zeros; and a phrase that says what adapter and head were made from.
    """
    policy = loader.policy
    head = None
    origin = "with a zero head"
    if value_model is not None:
        head = _on_base(loader, CRITIC, value_model)
        origin = f"`value_model` {value_model}"
    else:
        add_critic(policy, config)
        for i in rewards.critic_candidates():
            if i in heads and copy_adapter(policy, f"reward_{i}", CRITIC):
                head = copy.deepcopy(heads[i]).float().requires_grad_(True)
                origin = f"a copy of reward model '{rewards.names[i]}'"
                break
    return head, f"an adapter of rank {policy.peft_config[CRITIC].r} on the policy's base, {origin}"


def load_whole_critic(path: str, **kwargs: Any) -> tuple[Any, bool]:
    """Load a critic; return it, and whether it got a head of zeros, since the folder has none (a language model)."""
    critic, found = load_classifier(path, output_loading_info=True, **kwargs)
    is_new = any(not key.startswith(f"{critic.base_model_prefix}.") for key in found["missing_keys"])
    if is_new and hasattr(critic, "score"):  # else the head is refused by its name
        zero_(critic.score)
    return critic, is_new


def make_critic(loader: Loader, rewards: Rewards, value_model: Any) -> tuple[Any, str]:
    """
    Make a critic that has a base of its own: `value_model`, loaded from its path or as given.

    If `value_model` is None, the critic is a copy of the first reward model that is no PeftModel, and has a weight
    other than 0, the tokenizer of the policy (`loader.policy`), and as many embeddings as the policy; if there is
    none, it is a copy of the policy's backbone with a value head of zeros.

    Returns:
        The critic, and a phrase that says what it was made from.
    """
    critic: Any
    if isinstance(value_model, str) and is_adapter(value_model):
        critic = load_separately(value_model, **loader.kwargs)
        origin = f"`value_model` {value_model}"
    elif isinstance(value_model, str):
        critic, is_new = load_whole_critic(value_model, **loader.kwargs)
        origin = f"`value_model` {value_model}" + " with a zero head" * is_new
    elif value_model is not None:
        critic = value_model
        origin = "`value_model`"
    else:
        for i in rewards.critic_candidates():
            # The reward's own tokenizer: the policy's may have got another pad token since
            critic = _critic_from_reward(loader, unwrapped(rewards.functions[i]), rewards.tokenizers[i])
            if critic is not None:
                return critic, f"a copy of reward model '{rewards.names[i]}'"
        critic = critic_from_policy(loader.policy, loader.reloader(load_classifier))
        origin = "the policy's backbone with a zero head"
    check_critic(critic, rewards.policy_tokenizer)
    if vocabulary_of(critic) != vocabulary_of(loader.policy):
        check_same_ids("`value_model`", path_of(value_model), rewards.policy_tokenizer)
    return critic.requires_grad_(True), origin


def path_of(model: Any) -> str | None:
    """Return the folder or hub name of a model that is given as a path or an object; None if it has neither."""
    return model if isinstance(model, str) else get_config_model_id(unwrapped(model).config) or None


def _critic_from_reward(loader: Loader, reward: Any, tokenizer: Any) -> PreTrainedModel | None:
    """Return a trainable copy of a reward model in the policy's dtype; None if it does not fit the policy."""
    if isinstance(reward, PeftModel):  # its configuration names the base's path, not its own
        return None
    path = get_config_model_id(reward.config)
    load_again = partial(load_classifier, path, **loader.kwargs) if path else None
    critic = unpatched_copy(reward, "the critic", load_again)
    try:
        check_critic(critic, tokenizer)
    except ValueError:
        return None
    if vocabulary_of(critic) != vocabulary_of(loader.policy):
        return None
    return critic.to(loader.policy.dtype).requires_grad_(True).train()
