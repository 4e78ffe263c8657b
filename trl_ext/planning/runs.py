"""What a run takes: roles, phases, schedule and disk, from its parsed configuration, without any weights."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from peft import get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from ..models.actor_critic import ActorCritic
from ..models.adapter_switch import CRITIC, AdapterSwitch
from ..models.adapters import add_critic
from ..models.classifier import AdapterClassifier
from ..models.weights import base_model_of
from ..upstream import add_fused_lm_head
from .layout import Layout
from .memory import kv_cache_bytes, optimizer_bytes, quantized_bytes, share
from .simulate import fake, forward_peak, tokens, training_peak

Stage = Literal["sft", "reward", "ppo", "dpo"]


@dataclass
class Job:
    """
    A run to plan.

    Args:
        stage, args, layout: what runs, its training arguments, and on what.
        policy: configuration of the model that is trained; for `reward`, of the classifier.
        rewards: configurations of PPO's reward models with a base of their own.
        dtype: of the weights as loaded.
        peft_config, bits, nested: adapter; bits of a quantised base.
        prompt_length: tokens of a prompt, for PPO.
        value_model: configuration of PPO's critic if it is a path, else it has the policy's.
        ref_model: whether the reference was given, so that it is held even with adapters.
        shared_rewards: reward models that are adapters on the policy's base.
    """

    stage: Stage
    args: Any
    policy: Any
    layout: Layout = field(default_factory=Layout)
    rewards: tuple[Any, ...] = ()
    dtype: torch.dtype = torch.float32
    peft_config: Any = None
    bits: int | None = None
    nested: bool = False
    prompt_length: int = 512
    value_model: Any = None
    ref_model: bool = False
    shared_rewards: int = 0
    mixed: torch.dtype | None = None

    def __post_init__(self):
        self.mixed = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None

    @property
    def optim(self) -> str:
        """The optimizer's name; in the arguments it may be a member of an enumeration."""
        return str(getattr(self.args.optim, "value", self.args.optim))

    @property
    def compute_dtype(self) -> torch.dtype:
        """What the weights are when they compute: DeepSpeed and FSDP2 cast them, autocast leaves them."""
        casts = self.layout.is_deepspeed or self.layout.mode == "fsdp2"
        return self.mixed if casts and self.mixed is not None else self.dtype

    @property
    def autocast(self) -> torch.dtype | None:
        return None if self.compute_dtype == self.mixed and self.layout.mode != "single" else self.mixed


@dataclass
class Role:
    """One model on one GPU, in bytes."""

    name: str
    parameters: int
    trained: int
    weights: int
    gradients: int
    optimizer: int
    note: str = ""


@dataclass
class Plan:
    roles: list[Role]
    phases: dict[str, dict[str, int]]  # bytes beside weights and optimizer state, by what they are for
    schedule: dict[str, int]
    checkpoint: int  # bytes on disk
    host: int = 0  # bytes in the machine's memory, of each process

    @property
    def resident(self) -> int:
        """Bytes that are always there."""
        return sum(role.weights + role.optimizer for role in self.roles)

    @property
    def peak(self) -> int:
        return self.resident + max(sum(parts.values()) for parts in self.phases.values())

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))


def plan(job: Job) -> Plan:
    """The plan of a job; every pass is run once, on tensors without data."""
    return {"sft": _plan_sft, "reward": _plan_reward, "dpo": _plan_dpo, "ppo": _plan_ppo}[job.stage](job)


# ---- Models ----


def _causal_lm(job: Job, config: Any, outputs: tuple[str, ...] = ("log_probs",)) -> Any:
    model = AutoModelForCausalLM.from_config(config, dtype=job.compute_dtype)
    add_fused_lm_head(model, outputs=outputs)
    return model


def _classifier(job: Job, config: Any) -> Any:
    config = type(config)(**{**config.to_dict(), "num_labels": 1, "pad_token_id": config.pad_token_id or 0})
    return AutoModelForSequenceClassification.from_config(config, dtype=job.compute_dtype)


def _adapted(job: Job, model: Any) -> Any:
    """With its adapter, in the dtype that TRL gives it."""
    if job.peft_config is None:
        return model
    model = get_peft_model(
        model, job.peft_config, autocast_adapter_dtype=job.bits is None and job.layout.mode != "zero3"
    )
    if job.bits is not None:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
    return model


def _prepare(job: Job, model: Any) -> Any:
    """Training mode, checkpointing as the arguments say."""
    if job.args.activation_checkpointing:
        kwargs = dict(job.args.activation_checkpointing_kwargs or {"use_reentrant": False})
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
        if job.peft_config is not None:
            base_model_of(getattr(model, "policy", model)).enable_input_require_grads()
    return model.train()


def _linear_weights(model: nn.Module) -> frozenset[int]:
    """Ids of the weights that bitsandbytes quantises: those of frozen linear layers, without the output heads."""
    return frozenset(
        id(module.weight)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not module.weight.requires_grad and name.split(".")[-1] not in _HEADS
    )


_HEADS = ("lm_head", "score", "classifier")


def _role(
    job: Job,
    name: str,
    parameters: Iterable[nn.Parameter],
    quantized: frozenset[int] = frozenset(),
    note: str = "",
    *,
    is_sharded: bool = True,
) -> Role:
    """A role's numbers; `is_sharded`: whether ZeRO-3 or FSDP2 spread it, as they do what is trained."""
    layout, optim = job.layout, job.optim
    parameters = list({id(p): p for p in parameters}.values())
    trained = [p for p in parameters if p.requires_grad]
    numel, small = sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if id(p) in quantized)
    weights = quantized_bytes(small, job.bits, job.nested) if job.bits and small else 0
    weights += sum(p.nbytes for p in parameters if id(p) not in quantized or not job.bits)
    gradients, count = sum(p.nbytes for p in trained), sum(p.numel() for p in trained)
    if layout.is_deepspeed:  # a float32 copy and two moments
        state = count * 4 + (optimizer_bytes(count, 4, optim) if count else 0)
    elif layout.mode == "fsdp2" and job.mixed is not None:  # accelerate keeps what is trained in float32
        weights += count * 4 - gradients
        gradients = count * 4
        state = optimizer_bytes(count, 4, optim)
    else:
        state = sum(optimizer_bytes(p.numel(), p.element_size(), optim) for p in trained)
    if layout.mode == "ddp":
        gradients *= 2  # and the reducer's buckets
    if layout.shards_weights and is_sharded:
        weights = share(weights, layout.processes)
    if layout.shards_gradients:
        gradients = share(gradients, layout.processes)
    if layout.is_deepspeed or layout.mode == "fsdp2":
        state = share(state, layout.processes)
    return Role(name, numel, count, weights, gradients, state, note)


# ---- Phases ----


def _gathered(job: Job, *models: nn.Module) -> int:
    """Whole weights that a sharded run holds while it computes with them."""
    numel = sum(p.numel() for model in models for p in model.parameters())
    if job.layout.mode == "zero3":
        return min(job.layout.live_parameters, numel) * job.compute_dtype.itemsize
    if job.layout.mode == "fsdp2":  # the root's own (embeddings and heads), and two layers: this one, and the next
        layers = [sum(p.numel() for p in layer.parameters()) for layer in _layers(models[0])]
        root = sum(p.numel() for p in models[0].parameters()) - sum(layers)
        return (root + 2 * max(layers, default=0)) * job.compute_dtype.itemsize
    return 0


def _layers(model: nn.Module) -> list[nn.Module]:
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    return list(max(lists, key=lambda m: sum(p.numel() for p in m.parameters()), default=[]))


def _update(job: Job, mode: Any, model: Any, loss: Callable[[], Tensor], roles: list[Role], *others: Any) -> dict:
    """The phases `update`, a micro-batch's forward and backward pass, and `step`, the optimizer's."""
    gradients = sum(role.gradients for role in roles)
    accumulates = job.args.gradient_accumulation_steps > 1
    kind = "sharded" if job.layout.shards_gradients else "kept" if accumulates else "fresh"
    peak = training_peak(mode, model, loss, job.autocast, kind, tuple(others))
    if kind == "sharded":
        update = {"gradients": gradients, "activations": peak}
    else:
        whole = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        extra = gradients - whole  # DDP's buckets
        update = {"gradients": min(whole, peak) + extra, "activations": max(0, peak - whole)}
    update["gathered weights"] = _gathered(job, model, *others)
    if job.bits:
        quantized = _linear_weights(model)
        update["dequantised layer"] = 2 * max(p.numel() for p in model.parameters() if id(p) in quantized)
    step = {"gradients": gradients, "temporary": gradients if job.optim == "adamw_torch" else 0}
    return {"update": update, "step": step}


def _finish(job: Job, roles: list[Role], phases: dict, schedule: dict[str, int]) -> Plan:
    host = 0
    for role in roles:
        if job.layout.offloads_optimizer:
            host, role.optimizer = host + role.optimizer, 0
        if job.layout.offloads_weights:
            host, role.weights = host + role.weights, 0
    size = job.compute_dtype.itemsize if job.layout.is_deepspeed else job.dtype.itemsize
    state = 0
    for role in roles:
        if role.trained:
            wide = job.layout.is_deepspeed
            state += role.trained * (size + 4 * wide) + optimizer_bytes(role.trained, 4 if wide else size, job.optim)
    return Plan(roles, phases, schedule, state, host)


def _schedule(job: Job, rows_per_example: int, length: int) -> dict[str, int]:
    args = job.args
    step = args.per_device_train_batch_size * args.gradient_accumulation_steps * job.layout.processes
    return {
        "examples per optimizer step": step,
        "tokens per optimizer step, at most": step * rows_per_example * length,
    }


# ---- Stages ----


def _length(job: Job) -> int:
    return job.args.max_length or getattr(job.policy.get_text_config(), "max_position_embeddings", 1024)


def _plan_sft(job: Job) -> Plan:
    rows, length = job.args.per_device_train_batch_size, _length(job)
    model, mode = fake(lambda: _prepare(job, _adapted(job, _causal_lm(job, job.policy))))
    roles = [_role(job, "model", model.parameters(), _linear_weights(model))]

    def loss():
        batch = tokens(rows, length)
        return model(**batch, labels=batch["input_ids"], fused_lm_head=True).loss

    return _finish(job, roles, _update(job, mode, model, loss, roles), _schedule(job, 1, length))


def _plan_reward(job: Job) -> Plan:
    rows, length = 2 * job.args.per_device_train_batch_size, _length(job)
    if job.peft_config is not None:
        job.peft_config.task_type = "SEQ_CLS"
    model, mode = fake(lambda: _prepare(job, _adapted(job, _classifier(job, job.policy))))
    roles = [_role(job, "reward model", model.parameters(), _linear_weights(model))]

    def loss():
        return model(**tokens(rows, length)).logits.sum()

    return _finish(job, roles, _update(job, mode, model, loss, roles), _schedule(job, 2, length))


def _plan_dpo(job: Job) -> Plan:
    rows, length = 2 * job.args.per_device_train_batch_size, _length(job)
    has_reference = (job.peft_config is None and not job.args.precompute_ref_log_probs) or job.ref_model

    def build():
        model = _prepare(job, _adapted(job, _causal_lm(job, job.policy)))
        reference = _causal_lm(job, job.policy).requires_grad_(False).eval() if has_reference else None
        return model, reference

    (model, reference), mode = fake(build)
    roles = [_role(job, "policy", model.parameters(), _linear_weights(model))]
    if reference is not None:
        roles.append(_reference(job, reference))

    def loss():
        batch = tokens(rows, length)
        batch["labels"] = batch["input_ids"]
        value = model(**batch, fused_lm_head=True).log_probs.sum()
        if not job.args.precompute_ref_log_probs:
            with torch.no_grad():
                (model if reference is None else reference)(**batch, fused_lm_head=True)
        return value

    others = () if reference is None else (reference,)
    return _finish(job, roles, _update(job, mode, model, loss, roles, *others), _schedule(job, 2, length))


def _reference(job: Job, model: Any) -> Role:
    return _role(job, "reference", model.parameters())


def _plan_ppo(job: Job) -> Plan:
    args, layout = job.args, job.layout
    length = job.prompt_length + args.max_completion_length
    has_reference = args.use_ref_model and (job.peft_config is None or job.ref_model)
    shares_base = job.peft_config is not None and job.value_model is None

    def build():
        policy = _adapted(job, _causal_lm(job, job.policy, ("log_probs", "entropy")))
        if shares_base:
            add_critic(policy, None)
            adapters = AdapterSwitch(policy)
            model = ActorCritic(policy, AdapterClassifier(policy, adapters, CRITIC), adapters)
            model.train_adapters()
        else:
            critic = _classifier(job, job.value_model or job.policy)
            model = ActorCritic(policy, critic, None if job.peft_config is None else AdapterSwitch(policy))
        reference = _causal_lm(job, job.policy).requires_grad_(False).eval() if has_reference else None
        return _prepare(job, model), reference, [_classifier(job, c).requires_grad_(False).eval() for c in job.rewards]

    (model, reference, rewards), mode = fake(build)
    quantized = _linear_weights(model.policy)
    critic_note = "an adapter on the policy's base" if shares_base else ""
    roles = [
        _role(job, "policy", model.parameters_of("policy"), quantized),
        _role(job, "critic", model.parameters_of("critic"), note=critic_note),
    ]
    if reference is not None:
        roles.append(_reference(job, reference))
    elif args.use_ref_model:
        roles.append(Role("reference", 0, 0, 0, 0, 0, "the policy's base without its adapter"))
    for reward in rewards:  # FSDP does not shard them
        roles.append(_role(job, "reward model", reward.parameters(), is_sharded=layout.mode == "zero3"))
    for _ in range(job.shared_rewards):
        roles.append(Role("reward model", 0, 0, 0, 0, 0, "an adapter on the policy's base"))

    def loss():
        batch = tokens(args.per_device_train_batch_size, length)
        output = model(**batch, with_values=True, labels=batch["input_ids"], fused_lm_head=True)
        return output["log_probs"].sum() + output["entropy"].sum() + output["state_values"].sum()

    step = args.per_device_train_batch_size * args.gradient_accumulation_steps
    local = step * args.num_mini_batches
    rows = min(args.local_rollout_forward_batch_size, local)
    phases = {
        "generate": _generation(job, mode, model.policy, rows),
        "score": _scoring(job, mode, model, rewards, rows, length),
        **_update(job, mode, model, loss, roles),
    }
    episodes = local * layout.processes
    schedule = {
        "episodes per minibatch (optimizer step)": step * layout.processes,
        "episodes per rollout": episodes,
        "prompts per rollout": episodes // args.num_generations,
        "optimizer steps per rollout": args.num_mini_batches * args.num_ppo_epochs,
        "tokens per rollout, at most": episodes * length,
        "generated tokens per rollout, at most": episodes * args.max_completion_length,
    }
    if args.total_episodes:
        rollouts = math.ceil(args.total_episodes / episodes)
        schedule |= {"rollouts": rollouts, "optimizer steps": rollouts * schedule["optimizer steps per rollout"]}
    return _finish(job, roles, phases, schedule)


def _generation(job: Job, mode: Any, policy: Any, rows: int) -> dict[str, int]:
    if job.args.use_vllm:
        return {}
    config = base_model_of(policy).config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    length = job.prompt_length + job.args.max_completion_length
    depth, config.num_hidden_layers = config.num_hidden_layers, 2  # a pass without gradient keeps nothing of a layer
    policy.eval()
    # Without autocast: accelerate puts that on the forward of the whole, and this is the policy's own
    prefill = forward_peak(
        mode, policy, lambda: policy(**tokens(rows, job.prompt_length), logits_to_keep=1, use_cache=False)
    )
    policy.train()
    config.num_hidden_layers = depth
    gathered = _gathered(job, policy)
    if job.layout.shards_weights and job.args.ds3_gather_for_generation:  # all of it, once per rollout
        gathered = sum(p.numel() for p in policy.parameters()) * job.compute_dtype.itemsize
    return {
        "KV cache": kv_cache_bytes(depth, heads, head_dim, rows, length, job.compute_dtype.itemsize),
        "logits": 3 * rows * config.vocab_size * 4,  # as they come, scaled, and as probabilities
        "activations": prefill,
        "gathered weights": gathered,
    }


def _scoring(job: Job, mode: Any, model: Any, rewards: list, rows: int, length: int) -> dict[str, int]:
    """Log-probs and values of a rollout, then rewards. (The reference takes less than policy and critic do.)"""
    with mode:
        batch = tokens(rows, length)
    model.eval()
    peaks = [
        forward_peak(
            mode,
            model,
            lambda: model(**batch, with_values=True, labels=batch["input_ids"], fused_lm_head=True),
            job.autocast,
        )
    ]
    model.train()
    for reward in rewards:
        if type(reward.config) is type(job.policy) and reward.config.hidden_size <= job.policy.hidden_size:
            continue  # a backbone that takes no more than the policy's
        limit = getattr(reward.config, "max_position_embeddings", length)
        cut = {name: values[:, :limit] for name, values in batch.items()}
        peaks.append(forward_peak(mode, reward, partial(reward, **cut)))
    return {"activations": max(peaks), "gathered weights": _gathered(job, model)}
