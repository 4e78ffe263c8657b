"""Who is who: policy, reference, critic and reward models, each its own model or an adapter on the policy's base."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from peft import LoraConfig, PeftConfig, PeftModel
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel
from trl.trainer.callbacks import SyncRefModelCallback

from ..models.actor_critic import ActorCritic, check_critic, critic_from_policy, disable_dropout, unpatched_copy
from ..models.adapter_switch import (
    CRITIC,
    POLICY,
    REFERENCE,
    AdapterClassifier,
    AdapterSwitch,
    base_model_of,
    merge_exactly,
)
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
    prepare_peft_model,
    why_not_shared,
)
from ..upstream import (
    add_fused_lm_head,
    create_model_from_path,
    get_config_model_id,
    is_deepspeed_zero3_enabled,
    prepare_deepspeed,
    prepare_fsdp,
)
from .base import PPOTrainerBase
from .config import PPOConfig
from .rewards import AdapterReward, ModelReward, checked, same_tokenizer


class RolesMixin(PPOTrainerBase):
    """The models of [`PPOTrainer`] and its optimizer."""

    @staticmethod
    def _check_roles(
        model: Any, args: PPOConfig, reward_funcs: list, value_model: Any, peft_config: Any, critic_peft_config: Any
    ) -> list:
        """
        Refuse adapters that cannot be right; the reward functions, with those that were saved as adapters kept back
        from RLOO, which would load each with a base.
        """
        is_peft = peft_config is not None or isinstance(model, PeftModel)
        shares_base = value_model is None or is_adapter(value_model)
        if isinstance(model, PeftModel):
            prepare_peft_model(model, shares_base)
        elif is_peft:
            check_config(peft_config, "peft_config", shares_base)
        if critic_peft_config is not None and (not is_peft or value_model is not None):
            raise ValueError(
                "`critic_peft_config` is for a critic on the policy's base: it needs a policy with an adapter "
                "(`peft_config`) and no `value_model`."
            )
        if is_peft and args.sync_ref_model:
            raise ValueError(
                "`sync_ref_model=True` moves the reference, but with an adapter that is the frozen base or a frozen "
                "adapter: set it to False, or train all weights."
            )
        for reward in reward_funcs:
            if isinstance(reward, PeftModel):
                raise ValueError(
                    "A reward model may not be a `PeftModel`: pass the folder of its adapter, which can then share "
                    "the policy's base, or `reward_model.merge_and_unload()`."
                )
            if args.share_reward_base == "always" and is_adapter(reward) and not is_peft:
                raise ValueError(
                    f"`share_reward_base='always'`, but the policy trains all of its weights, so that {reward} needs "
                    "a base of its own: pass `peft_config`, or use 'auto'."
                )
        return [AdapterReward(reward) if is_adapter(reward) else reward for reward in reward_funcs]

    def _load_kwargs(self, policy: Any) -> dict[str, Any]:
        """How to load another model: as the policy, but for the revision, which is the policy's own."""
        kwargs = {"dtype": policy.dtype, "trust_remote_code": self.args.trust_remote_code}
        kwargs |= self.args.model_init_kwargs or {}
        kwargs.pop("revision", None)
        if self.accelerator.num_processes > 1 or self.is_deepspeed_enabled:
            kwargs["device_map"] = None  # by default TRL spreads a model over all GPUs
        return kwargs

    def _load_again(self, load: Callable[..., Any], policy: Any) -> Callable[[], Any] | None:
        """How to load the policy's weights once more, where ZeRO-3 has partitioned those that are there."""
        if self._policy_path is None:
            return None
        revision = (self.args.model_init_kwargs or {}).get("revision")
        return partial(load, self._policy_path, revision=revision, **self._load_kwargs(policy))

    def _prepare_reference(self, policy: Any, ref_model: str | PreTrainedModel | None) -> None:
        args = self.args
        self._has_reference = args.use_ref_model
        self.beta = float(self._has_reference)  # RLOO: whether there is a reference pass
        if not self._has_reference or (self._is_peft and ref_model is None):
            return  # with PEFT, RLOO switches the adapter off for the reference pass
        if isinstance(ref_model, str):
            kwargs = self._load_kwargs(policy)
            reference = create_model_from_path(ref_model, **kwargs)
        else:
            again = self._load_again(create_model_from_path, policy)
            reference = unpatched_copy(policy, "the reference", again) if ref_model is None else ref_model
        vocabularies = [m.config.get_text_config().vocab_size for m in (reference, base_model_of(policy))]
        if vocabularies[0] != vocabularies[1]:
            raise ValueError(
                f"`ref_model` has a vocabulary of {vocabularies[0]} tokens, the policy one of {vocabularies[1]}: it "
                "must score the policy's token ids."
            )
        reference.requires_grad_(False).eval()
        if args.disable_dropout:
            disable_dropout(reference)
        add_fused_lm_head(reference, temperature=self.temperature)
        if self.is_deepspeed_enabled:
            self.ref_model = prepare_deepspeed(reference, self.accelerator)
        elif self.is_fsdp_enabled:
            self.ref_model = prepare_fsdp(reference, self.accelerator)
        else:
            self.ref_model = self.accelerator.prepare_model(reference, evaluation_mode=True)
        if args.sync_ref_model:
            self.remove_callback(_SyncReference)  # of the reference before resuming
            self.add_callback(_SyncReference(ref_model=self.ref_model, accelerator=self.accelerator))

    def _make_actor_critic(
        self, policy: Any, value_model: str | PreTrainedModel | None, critic_config: LoraConfig | None
    ) -> ActorCritic:
        if self._is_peft:
            self._check_base(policy)
        heads = self._load_adapter_rewards(policy)
        if not self._is_peft:
            return ActorCritic(policy, self._make_critic(policy, value_model))
        is_separate = value_model is not None and not is_adapter(value_model)
        head = None if is_separate else self._add_critic(policy, value_model, critic_config, heads)

        adapters = AdapterSwitch(policy)  # now that all are there
        classifier = partial(AdapterClassifier, policy, adapters)
        actor_critic = ActorCritic(
            policy,
            self._make_critic(policy, value_model) if is_separate else classifier(CRITIC, head),
            adapters,
            {
                f"reward_{i}": classifier(f"reward_{i}", head, self.reward_processing_classes[i].pad_token_id)
                for i, head in heads.items()
            },
        )
        actor_critic.train_adapters()
        if is_deepspeed_zero3_enabled() and not is_separate:  # it gathers parameters of one dtype only
            actor_critic.critic.score.to(next(p.dtype for p in policy.parameters() if p.requires_grad))
        return actor_critic

    def _check_base(self, policy: Any) -> None:
        check_modules(policy, policy.peft_config[POLICY], "peft_config")
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is not None and plugin.activation_checkpointing:
            raise ValueError(
                "FSDP's own activation checkpointing replays layers in `backward` under whatever adapter is active "
                "then, with wrong gradients: set `fsdp_activation_checkpointing: false` in accelerate's configuration "
                "and `activation_checkpointing: true` in the training arguments."
            )
        if self.use_vllm:
            if getattr(base_model_of(policy).config, "quantization_config", None) is not None:
                raise ValueError(
                    "`use_vllm=True` with a quantised base: vLLM would be sent the merged weights quantised anew, and "
                    "sample from another policy than the one that is trained. Load the base unquantised, or generate "
                    "without vLLM."
                )
            merge_exactly(policy)
        for name, parameter in policy.named_parameters():
            # With a quantised base RLOO rounds what it trains to bfloat16, but not the reference that it has copied
            if f".{REFERENCE}." in name:
                parameter.data = policy.get_parameter(name.replace(f".{REFERENCE}.", f".{POLICY}.")).data.clone()

    def _load_adapter_rewards(self, policy: Any) -> dict[int, nn.Linear]:
        """Give each reward model that was saved as an adapter the policy's base or its own; heads of the former."""
        heads = {}
        for i, reward in enumerate(self.reward_funcs):
            if not isinstance(reward, AdapterReward):
                continue
            tokenizer = self.reward_processing_classes[i]
            if tokenizer is None:
                tokenizer = AutoTokenizer.from_pretrained(reward.path, trust_remote_code=self.args.trust_remote_code)
            if tokenizer.pad_token_id is None:
                tokenizer.pad_token = tokenizer.eos_token
            self.reward_processing_classes[i] = tokenizer

            reason = self._why_separate(policy, reward.path)
            if reason is None:
                heads[i] = add_reward(policy, f"reward_{i}", reward.path)
                continue
            if self.args.share_reward_base == "always":
                raise ValueError(f"`share_reward_base='always'`, but {reward.path} cannot share the base: {reason}.")
            self.accelerator.print(f"Reward model {reward.path} gets a base of its own: {reason}.")
            model: Any = load_separately(reward.path, **self._load_kwargs(policy))
            model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
            if self.is_deepspeed_enabled:
                model = prepare_deepspeed(model, self.accelerator)
            else:
                model = self.accelerator.prepare_model(model, evaluation_mode=True, device_placement=True)
            self.reward_funcs[i] = model
        return heads

    def _why_separate(self, policy: Any, path: str) -> str | None:
        share = self.args.share_reward_base
        if share == "never" or not self._is_peft:
            return "`share_reward_base='never'`" if self._is_peft else "the policy trains all of its weights"
        own = base_fingerprint(policy)  # on all processes: ZeRO-3 gathers
        reason: list[str | None] = [None]
        if self.accelerator.is_main_process:
            reason = [why_not_shared(policy, path, own, assume_quantization=share == "always")]
        return broadcast_object_list(reason)[0] if self.accelerator.num_processes > 1 else reason[0]

    def _add_critic(
        self, policy: Any, value_model: str | None, config: LoraConfig | None, heads: dict[int, nn.Linear]
    ) -> nn.Linear | None:
        """Add the critic's adapter; its head, unless that is to be zero."""
        head = None
        if value_model is not None:
            reason = why_not_shared(policy, value_model, base_fingerprint(policy), assume_quantization=True)
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
                if same_tokenizer(self.reward_processing_classes[i], self._tokenizer) and copy_adapter(
                    policy, f"reward_{i}", CRITIC
                ):
                    head, origin = copy.deepcopy(reward_head), f"a copy of reward model '{self.reward_func_names[i]}'"
                    break
        self._critic_origin = f"an adapter of rank {policy.peft_config[CRITIC].r} on the policy's base, {origin}"
        if head is not None:
            head.to(torch.float32).requires_grad_(True)
        return head

    def _make_critic(self, policy: Any, value_model: str | PreTrainedModel | None) -> PreTrainedModel:
        """A critic with a base of its own."""
        critic: Any
        if isinstance(value_model, str):
            kwargs = self._load_kwargs(policy)
            if is_adapter(value_model):
                critic = load_separately(value_model, **kwargs)
            else:
                critic = AutoModelForSequenceClassification.from_pretrained(value_model, num_labels=1, **kwargs)
            self._critic_origin = f"`value_model` {value_model}"
        elif value_model is not None:
            critic, self._critic_origin = value_model, "`value_model`"
        else:
            for reward, tokenizer, name in zip(
                self.reward_funcs, self.reward_processing_classes, self.reward_func_names, strict=True
            ):
                if isinstance(reward, nn.Module) and same_tokenizer(tokenizer, self._tokenizer):
                    critic = self.accelerator.unwrap_model(reward)
                    if isinstance(critic, PeftModel):  # under ZeRO-3; its path is that of its base alone
                        continue
                    path, load = get_config_model_id(critic.config), AutoModelForSequenceClassification.from_pretrained
                    again = partial(load, path, num_labels=1, **self._load_kwargs(policy)) if path else None
                    critic = unpatched_copy(critic, "the critic", again)
                    try:
                        check_critic(critic, policy)
                    except ValueError:
                        continue
                    self._critic_origin = f"a copy of reward model '{name}'"
                    return critic.to(policy.dtype).requires_grad_(True).train()
            load = partial(AutoModelForSequenceClassification.from_pretrained, num_labels=1)
            critic = critic_from_policy(policy, self._load_again(load, policy))
            self._critic_origin = "the policy's backbone with a zero head"
        check_critic(critic, policy)
        return critic.requires_grad_(True)

    def _prepare_rewards(self) -> None:
        for i, (reward, tokenizer) in enumerate(zip(self.reward_funcs, self.reward_processing_classes, strict=True)):
            is_shared = isinstance(reward, AdapterReward)
            if is_shared or isinstance(reward, nn.Module):
                owner = self.model.rewards[f"reward_{i}"] if is_shared else self.accelerator.unwrap_model(reward)
                config: Any = owner.config  # DeepSpeed's engine has another `config`
                if config.num_labels != 1:
                    raise ValueError(
                        f"Reward model '{self.reward_func_names[i]}' has num_labels={config.num_labels}; a reward "
                        "model needs one label: load it with `num_labels=1`."
                    )
                if is_shared:
                    score: Callable[..., Tensor] = partial(self._score_on_base, f"reward_{i}")
                else:
                    reward.requires_grad_(False)
                    reward.eval()  # of DeepSpeed's engine it returns nothing
                    score = partial(_score, reward)
                reward = ModelReward(
                    score,
                    getattr(config, "max_position_embeddings", None),
                    self.accelerator.device,
                    tokenizer,
                    self._tokenizer,
                    self.args.local_rollout_forward_batch_size,
                    lambda ids: ids[-1] in self.eos_token_ids,
                    lambda: self._prompt_ids,
                    self.chat_template_kwargs,
                )
            self.reward_funcs[i] = checked(reward, self.reward_func_names[i], self._mistakes)

    def _score_on_base(self, name: str, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        is_training = self.model.training
        self.model.eval()  # no dropout, and no activation checkpointing
        try:
            return self.model(input_ids, attention_mask, reward=name)
        finally:
            self.model.train(is_training)

    def _train_adapters(self) -> None:
        if self._is_peft:
            self.accelerator.unwrap_model(self.model).train_adapters()

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        actor_critic = self.accelerator.unwrap_model(model or self.model)
        optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for role in ("policy", "critic"):
            missing = sum(p.requires_grad and id(p) not in optimized for p in actor_critic.parameters_of(role))
            if missing:
                raise ValueError(
                    f"{missing} trainable weights of the {role} are not in the optimizer and would never change: add "
                    "them to the one passed in `optimizers` (a critic that the trainer builds cannot be in it: pass "
                    "`value_model`, or `optimizer_cls_and_kwargs`), or freeze them with `requires_grad_(False)`."
                )
        if not is_new or self.args.critic_learning_rate is None:
            return optimizer
        critic = {id(p) for p in actor_critic.parameters_of("critic")}
        for group in list(optimizer.param_groups):
            params = group["params"]
            group["params"] = [p for p in params if id(p) not in critic]
            options = {name: value for name, value in group.items() if name != "params"}
            options["lr"] = self.args.critic_learning_rate
            optimizer.add_param_group({**options, "params": [p for p in params if id(p) in critic]})
        return optimizer


def _score(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    return model(input_ids=input_ids, attention_mask=attention_mask).logits[:, 0]


class _SyncReference(SyncRefModelCallback):
    def on_step_end(self, args, state, control, **kwargs):
        kwargs["model"] = self.accelerator.unwrap_model(kwargs["model"]).policy
        super().on_step_end(args, state, control, **kwargs)
