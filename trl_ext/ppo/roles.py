"""Make the reference, critic and reward models: each is its own model or an adapter on the policy's base."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from peft import LoraConfig, PeftConfig, PeftModel, load_peft_weights
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from ..models.actor_critic import ActorCritic
from ..models.adapter_switch import CRITIC, POLICY, REFERENCE, AdapterSwitch, merge_exactly
from ..models.adapters import (
    add_critic,
    add_reward,
    base_fingerprint,
    check_config,
    check_modules,
    copy_adapter,
    is_adapter,
    load_head,
    load_separately,
    names_base,
    prepare_peft_model,
    why_not_shared,
)
from ..models.classifier import AdapterClassifier, check_critic, critic_from_policy
from ..models.generation import forked_rng
from ..models.identity import hash_of, hub_identity, tokenizer_identity, weights_identity
from ..models.lm_head import add_dense_lm_head
from ..models.loading import Loader
from ..models.saved_adapter import load_merged, load_tokenizer
from ..models.weights import (
    base_model_of,
    check_same_ids,
    disable_dropout,
    unpatched_copy,
    unwrapped,
    vocabulary_of,
)
from ..rewards.checks import checked_name
from ..rewards.member import distinct
from ..rewards.model import ModelReward, load_classifier, load_reward_model, logits_of, same_tokenizer
from ..runs.processes import on_first
from ..runs.sources import source_identity
from ..upstream.names import add_fused_lm_head, create_model_from_path, get_config_model_id, is_deepspeed_zero3_enabled
from .config import PPOConfig
from .rewards import AdapterReward, CheckedReward, Mistakes

Share = Literal["auto", "never", "always"]


def check_roles(
    model: Any, args: PPOConfig, reward_funcs: list, value_model: Any, peft_config: Any, critic_peft_config: Any
) -> list:
    """
    Raise if the adapters and settings cannot work together.

    Returns:
        The reward functions. The path of a saved adapter is replaced by an [`AdapterReward`], since GRPO would load a
        base model for each adapter.
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
    if is_peft and args.sync_ref_model:
        raise ValueError(
            "`sync_ref_model=True` moves the reference, but a policy with an adapter has a frozen one: the base, or a "
            "copy of the adapter. Set `sync_ref_model=False`, or train all weights."
        )
    for reward in reward_funcs:
        if isinstance(reward, PeftModel):
            raise ValueError(
                "A reward model cannot be a `PeftModel`. Pass the folder of its adapter, which can then share the "
                "policy's base, or pass `reward_model.merge_and_unload()`."
            )
        if args.share_reward_base == "always" and is_adapter(reward) and not is_peft:
            raise ValueError(
                f"`share_reward_base='always'`, but the policy trains all of its weights, so {reward} needs "
                "a base of its own: pass `peft_config`, or use 'auto'."
            )
    return [AdapterReward(reward) if is_adapter(reward) else reward for reward in reward_funcs]


def load_rewards(reward_funcs: list, tokenizers: list, args: PPOConfig) -> None:
    """
    Replace, in place, each path in `reward_funcs` by the reward model there; raise if the model has no head.

    If the model has no tokenizer in `tokenizers` yet, its own is loaded and put there.
    """
    kwargs = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
    if args.world_size > 1 or args.deepspeed_plugin is not None:
        kwargs["device_map"] = None
    named = {name: kwargs.get(name) for name in ("revision", "trust_remote_code")}
    for i, path in enumerate(reward_funcs):
        if isinstance(path, str):
            reward_funcs[i] = load_reward_model(path, **kwargs)
            if tokenizers[i] is None:
                tokenizers[i] = AutoTokenizer.from_pretrained(path, **named)


def check_base(policy: Any, accelerator: Any, use_vllm: bool) -> None:
    """Raise if a policy with adapters would silently train with wrong gradients or samples."""
    check_modules(policy, policy.peft_config[POLICY], "peft_config")
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.activation_checkpointing:
        raise ValueError(
            "FSDP's own activation checkpointing computes layers again in `backward`, with the adapter that is active "
            "then, so gradients would be wrong. Set `fsdp_activation_checkpointing: false` in accelerate's "
            "configuration and `activation_checkpointing: true` in the training arguments."
        )
    if use_vllm and getattr(base_model_of(policy).config, "quantization_config", None) is not None:
        raise ValueError(
            "`use_vllm=True` does not work with a quantised base: vLLM would get merged weights that were quantised "
            "again, and sample from another policy than the trained one. Load the base unquantised, or generate "
            "without vLLM."
        )


def prepare_base(policy: Any, use_vllm: bool) -> None:
    """Copy the policy's adapter into the reference's; if `use_vllm`, make TRL's merging of adapters exact."""
    if use_vllm:
        merge_exactly(policy)
    for name, parameter in policy.named_parameters():
        # With a quantised base GRPO rounds the adapter to bfloat16, but not the copy of it that is the reference
        if f".{REFERENCE}." in name:
            parameter.data = policy.get_parameter(name.replace(f".{REFERENCE}.", f".{POLICY}.")).data.clone()


# ---- Reference ----


def make_reference(loader: Loader, ref_model: Any, args: PPOConfig, tokenizer: Any) -> Any:
    """
    Return the frozen reference model, not yet on its device.

    `ref_model` is a path or an object; None makes a copy of the policy as it is now. `tokenizer` is the policy's.
    """
    if isinstance(ref_model, str):
        load = load_merged if is_adapter(ref_model) else create_model_from_path
        reference = load(ref_model, **loader.kwargs)
    elif ref_model is None:
        reference = unpatched_copy(loader.policy, "the reference", loader.again(create_model_from_path))
    else:
        reference = ref_model
    theirs, ours = vocabulary_of(reference), vocabulary_of(loader.policy)
    if theirs < ours:
        raise ValueError(
            f"`ref_model` has a vocabulary of {theirs} tokens, but the policy has {ours}, and the reference must "
            "score all of them. Leave `ref_model` out to use a frozen copy of the policy, or cut unused rows off the "
            f"policy with `model.resize_token_embeddings({theirs})`."
        )
    if theirs > ours:
        check_same_ids("`ref_model`", named(ref_model), tokenizer)
        if args.sync_ref_model:
            raise ValueError(
                f"`sync_ref_model=True` averages `ref_model` and the policy, but their vocabularies have {theirs} and "
                f"{ours} tokens. Leave `ref_model` out, or set `sync_ref_model=False`."
            )
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
        functions: functions and models, as GRPO has them, and [`AdapterReward`] for adapters.
        tokenizers: one for each reward, None for functions.
        names: a name for each reward.
        policy_tokenizer: the policy's tokenizer.
        paths: what each model was loaded from; None for a reward that was passed in as an object.
        weights: one for each reward, 1 by default. A reward with weight 0 only measures: it does not affect training.
    """

    def __init__(
        self,
        functions: list,
        tokenizers: list,
        names: list[str],
        policy_tokenizer: Any,
        paths: list[str | None] | None = None,
        weights: list[float] | None = None,
    ):
        self.functions = list(functions)
        self.paths = paths or [None] * len(functions)
        self.only_measures = [weight == 0 for weight in weights or [1.0] * len(functions)]
        self.tokenizers = list(tokenizers)
        # Metrics are kept by name: two lambdas, or two models from folders of one name, would be merged
        self.names = distinct([name or f"reward_model_{i}" for i, name in enumerate(names)])
        self.policy_tokenizer = policy_tokenizer
        for reward in functions:
            if isinstance(reward, nn.Module):
                config = unwrapped(reward).config.get_text_config()
                if (config.pad_token_id or 0) >= config.vocab_size:
                    config.pad_token_id = None  # GRPO has set it; a model that is saved with it cannot be loaded

    def load_adapters(self, loader: Loader, share: Share) -> dict[int, nn.Linear]:
        """
        Load the reward models that were saved as adapters, on the policy's base where they can share it.

        Returns:
            The heads of the models that share the base, by the index of the reward.

        Raises:
            ValueError: `share` is "always", and a model cannot share the base.
        """
        heads = {}
        for i, reward in enumerate(self.functions):
            if not isinstance(reward, AdapterReward):
                continue
            tokenizer = self.tokenizers[i]
            if tokenizer is None:
                tokenizer = load_tokenizer(reward.path, trust_remote_code=loader.trust_remote_code)
            if tokenizer.pad_token_id is None:
                tokenizer.pad_token = tokenizer.eos_token
            self.tokenizers[i] = tokenizer

            reason = why_separate(loader, reward.path, share)
            if reason is not None and share == "always":
                raise ValueError(f"`share_reward_base='always'`, but {reward.path} cannot share the base: {reason}.")
            # PEFT draws random weights before it loads the file's weights
            with forked_rng(loader.accelerator.device) if self.only_measures[i] else nullcontext():
                if reason is None:
                    heads[i] = add_reward(loader.policy, f"reward_{i}", reward.path)
                    continue
                loader.accelerator.print(f"Reward model {reward.path} gets a base of its own: {reason}.")
                self.functions[i] = loader.placed(load_separately(reward.path, **loader.kwargs), shard=False)
        return heads

    def identities(self) -> dict[str, Any]:
        """Return the identity of each reward: a model's weights and tokenizer, or a function's source."""
        facts: dict[str, Any] = {"rewards": self.names}
        for i, (reward, tokenizer, name) in enumerate(zip(self.functions, self.tokenizers, self.names, strict=True)):
            if isinstance(reward, AdapterReward):
                weights = hash_of(load_peft_weights(reward.path, device="cpu"))
                identity = hub_identity(reward.path) or f"xxh3:{weights[:12]}"
            elif isinstance(reward, nn.Module):
                identity = weights_identity(unwrapped(reward), self.paths[i])
            else:
                identity = source_identity(reward)
            facts[f"reward {name}"] = " ".join(filter(None, (identity, tokenizer_identity(tokenizer))))
        return facts

    def disable_dropout(self) -> None:
        for reward in self.functions:
            if isinstance(reward, nn.Module):
                disable_dropout(reward)

    def as_functions(
        self,
        actor_critic: ActorCritic,
        args: PPOConfig,
        eos_token_ids: list[int],
        mistakes: Mistakes,
        forward: Callable,
        own_draws: Callable[[], AbstractContextManager],
    ) -> list[Callable]:
        """
        Wrap each reward, models included, in a [`CheckedReward`].

        Args:
            actor_critic: has the reward models that share the policy's base.
            args: the trainer's configuration.
            eos_token_ids: the tokens that end a response.
            mistakes: collects the errors of reward functions.
            forward: `forward(name, …)` scores rows with the reward model `name`, which shares the policy's base. It
                runs the actor-critic inside its FSDP or DeepSpeed wrapper.
            own_draws: makes a context with a random state of its own. Functions of weight 0 run in this context, and
                none of them in the background: a thread would draw from the generator that training draws from.
        """
        result: list[Callable] = []
        for i, (reward, tokenizer, name) in enumerate(zip(self.functions, self.tokenizers, self.names, strict=True)):
            is_shared = isinstance(reward, AdapterReward)
            if is_shared or isinstance(reward, nn.Module):
                owner: Any = actor_critic.rewards[f"reward_{i}"] if is_shared else unwrapped(reward)
                if owner.config.num_labels != 1:  # DeepSpeed's engine has another `config`
                    raise ValueError(
                        f"Reward model '{name}' has num_labels={owner.config.num_labels}; a reward model needs one "
                        "label: load it with `num_labels=1`."
                    )
                if is_shared:
                    score: Callable[..., Tensor] = partial(forward, f"reward_{i}")
                else:
                    reward.requires_grad_(False)
                    reward.eval()  # not chained: DeepSpeed's engine returns None here
                    score = partial(logits_of, reward)
                reward = ModelReward(
                    owner,
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
            result.append(CheckedReward(reward, name, mistakes, own_draws if self.only_measures[i] else None))
        return result


def why_separate(loader: Loader, path: str, share: Share) -> str | None:
    """Return why a reward model that was saved as an adapter cannot use the policy's base; None if it can."""
    if not isinstance(loader.policy, PeftModel):
        return "the policy trains all of its weights"
    if share == "never":
        return "`share_reward_base='never'`"
    own = fingerprint_beside(loader, path)
    return on_first(lambda: why_not_shared(loader.policy, path, own, assume_quantization=share == "always"))


def fingerprint_beside(loader: Loader, adapter: str) -> dict[str, str]:
    """Return the fingerprint of the policy's base; if the adapter names that base, return {} and read no weights."""
    base = hub_identity(loader.path, loader.init_kwargs.get("revision"))
    # All processes come here, since ZeRO-3 gathers the weights
    return {} if names_base(adapter, loader.policy, base) else base_fingerprint(loader.policy)


# ---- Critic ----


def make_actor_critic(
    loader: Loader,
    rewards: Rewards,
    heads: dict[int, nn.Linear],
    value_model: Any,
    critic_config: LoraConfig | None,
) -> tuple[ActorCritic, str]:
    """
    Put the policy, the critic, and the reward models that share the policy's base into one module.

    Args:
        loader: holds the policy.
        rewards, heads: all rewards, and the heads of the models that share the base, as `load_adapters` returns them.
        value_model: a path or an object; None makes the critic from a reward model or the policy.
        critic_config: configuration of the critic's adapter.

    Returns:
        The module, and a phrase that says what its critic was made from.
    """
    policy = loader.policy
    if not isinstance(policy, PeftModel):
        critic, origin = make_critic(loader, rewards, value_model)
        return ActorCritic(policy, critic), origin
    is_separate = value_model is not None and not is_adapter(value_model)
    head = None
    if is_separate:
        critic, origin = make_critic(loader, rewards, value_model)
    else:
        head, origin = add_critic_adapter(loader, rewards, heads, value_model, critic_config)
    adapters = AdapterSwitch(policy)  # now that all adapters are there
    on_base = partial(AdapterClassifier, policy, adapters)
    actor_critic = ActorCritic(
        policy,
        critic if is_separate else on_base(CRITIC, head),
        adapters,
        {f"reward_{i}": on_base(f"reward_{i}", head) for i, head in heads.items()},
    )
    actor_critic.train_adapters()
    if is_deepspeed_zero3_enabled() and not is_separate:  # ZeRO-3 gathers parameters of one dtype only
        actor_critic.critic.score.to(next(p.dtype for p in policy.parameters() if p.requires_grad))
    return actor_critic, origin


def add_critic_adapter(
    loader: Loader, rewards: Rewards, heads: dict[int, nn.Linear], value_model: str | None, config: LoraConfig | None
) -> tuple[nn.Linear | None, str]:
    """
    Add the critic's adapter to the policy.

    Returns:
        The critic's head, None for a head of zeros; and a phrase that says what adapter and head were made from.
    """
    policy, head = loader.policy, None
    if value_model is not None:
        reason = why_not_shared(policy, value_model, fingerprint_beside(loader, value_model), assume_quantization=True)
        if reason:
            raise ValueError(f"`value_model` {value_model} cannot be an adapter on the policy's base: {reason}.")
        config = PeftConfig.from_pretrained(value_model)
        config.modules_to_save = None
        add_critic(policy, config)
        head, origin = load_head(policy, CRITIC, value_model), f"`value_model` {value_model}"
    else:
        add_critic(policy, config)
        origin = "with a zero head"
        for i, reward_head in heads.items():
            if rewards.only_measures[i] or not same_tokenizer(rewards.tokenizers[i], rewards.policy_tokenizer):
                continue
            if copy_adapter(policy, f"reward_{i}", CRITIC):
                head, origin = copy.deepcopy(reward_head), f"a copy of reward model '{rewards.names[i]}'"
                break
    if head is not None:
        head.to(torch.float32).requires_grad_(True)
    return head, f"an adapter of rank {policy.peft_config[CRITIC].r} on the policy's base, {origin}"


def make_critic(loader: Loader, rewards: Rewards, value_model: Any) -> tuple[Any, str]:
    """Make a critic with a base of its own; return the critic, and a phrase that says what it was made from."""
    critic: Any
    if isinstance(value_model, str):
        if is_adapter(value_model):
            critic = load_separately(value_model, **loader.kwargs)
        else:
            critic = load_classifier(value_model, **loader.kwargs)
        origin = f"`value_model` {value_model}"
    elif value_model is not None:
        critic, origin = value_model, "`value_model`"
    else:
        of_each = zip(rewards.functions, rewards.tokenizers, rewards.names, rewards.only_measures, strict=True)
        for reward, tokenizer, name, only_measures in of_each:
            is_model = isinstance(reward, nn.Module) and not only_measures
            if is_model and same_tokenizer(tokenizer, rewards.policy_tokenizer):
                critic = _critic_from_reward(loader, unwrapped(reward), tokenizer)
                if critic is not None:
                    return critic, f"a copy of reward model '{name}'"
        load = partial(AutoModelForSequenceClassification.from_pretrained, num_labels=1)
        critic = critic_from_policy(loader.policy, loader.again(load))
        origin = "the policy's backbone with a zero head"
    check_critic(critic, rewards.policy_tokenizer)
    if vocabulary_of(critic) != vocabulary_of(loader.policy):
        check_same_ids("`value_model`", named(value_model), rewards.policy_tokenizer)
    return critic.requires_grad_(True), origin


def named(model: Any) -> str | None:
    """Return the folder or hub name of a model, given as a path or an object; None if the model has neither."""
    return model if isinstance(model, str) else get_config_model_id(model.config) or None


def _critic_from_reward(loader: Loader, reward: Any, tokenizer: Any) -> PreTrainedModel | None:
    if isinstance(reward, PeftModel):  # under ZeRO-3; its configuration names the base's path, not its own
        return None
    path, load = get_config_model_id(reward.config), AutoModelForSequenceClassification.from_pretrained
    again = partial(load, path, num_labels=1, **loader.kwargs) if path else None
    critic = unpatched_copy(reward, "the critic", again)
    try:
        check_critic(critic, tokenizer)
    except ValueError:
        return None
    if vocabulary_of(critic) != vocabulary_of(loader.policy):
        return None
    return critic.to(loader.policy.dtype).requires_grad_(True).train()
