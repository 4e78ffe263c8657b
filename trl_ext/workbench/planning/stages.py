"""Plan each training stage: its models, the bytes of its phases, its schedule and its disk."""

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from peft import get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from ... import models
from . import memory
from .runs import Job, Plan, Role

_NAMES = {"sft": "model", "reward": "reward model", "pretrain_critic": "critic", "dpo": "policy"}
_HEADS = ("lm_head", "score", "classifier")  # the names of output heads, which bitsandbytes does not quantise


def plan(job: Job) -> Plan:
    """Plan the run `job`, by running each of its passes once on fake tensors, which have shapes but no data."""
    with nullcontext() if job.args.use_cpu else models.lm_head_in_place():
        return _plan_ppo(job) if job.stage == "ppo" else _plan_without_rollouts(job)


def _plan_without_rollouts(job: Job) -> Plan:
    args = job.args
    is_lm = job.stage in ("sft", "dpo")
    texts = 2 if job.stage in ("reward", "dpo") else 1
    has_reference = job.stage == "dpo" and (
        job.ref_model or (job.peft_config is None and not args.precompute_ref_log_probs)
    )

    def build() -> Any:
        if job.peft_config is not None and not is_lm:
            job.peft_config.task_type = "SEQ_CLS"
        model = adapted(job, causal_lm(job, job.policy) if is_lm else classifier(job, job.policy))
        if job.stage == "pretrain_critic":
            models.add_value_forward(model)
        return prepare(job, model), frozen(causal_lm(job, job.policy)) if has_reference else None

    (model, reference), mode = memory.fake(build)
    roles = [role_of(job, _NAMES[job.stage], model.parameters(), linear_weights(model))]
    if reference is not None:
        roles.append(role_of(job, "reference", reference.parameters()))
    elif job.stage == "dpo" and job.ref_adapter:
        roles.append(_copied_adapter(job, roles[0]))

    def loss() -> Tensor:
        batch = memory.tokens(texts * args.per_device_train_batch_size, job.length)
        if job.stage == "sft":
            return model(**batch, labels=batch["input_ids"], fused_lm_head=True).loss
        if job.stage == "reward":
            return model(**batch).logits.sum()
        if job.stage == "pretrain_critic":
            return model(**batch, predicts=torch.arange(batch["input_ids"].numel()))["values"].sum()
        batch["labels"] = batch["input_ids"]
        value = model(**batch, fused_lm_head=True).log_probs.sum()
        if not args.precompute_ref_log_probs:
            with torch.no_grad():
                (model if reference is None else reference)(**batch, fused_lm_head=True)
        return value

    others = () if reference is None else (reference,)
    step = args.per_device_train_batch_size * args.gradient_accumulation_steps * job.layout.processes
    schedule = {
        "examples per optimizer step": step,
        "tokens per optimizer step, at most": step * texts * job.length,
    }
    return _finish(job, Plan(roles, update_phases(job, mode, model, loss, roles, *others), schedule, 0))


def _plan_ppo(job: Job) -> Plan:
    args = job.args
    layout = job.layout
    length = job.prompt_length + args.max_completion_length
    has_reference = args.use_ref_model and (job.peft_config is None or job.ref_model)
    has_critic = args.baseline != "mean"
    shares_base = has_critic and job.peft_config is not None and job.value_model is None

    def build():
        policy = causal_lm(job, job.policy, ("log_probs", "entropy"))
        models.add_dense_lm_head(policy, budget_gb=args.logits_budget_gb)
        policy = adapted(job, policy)
        if shares_base:
            models.add_critic(policy, None)
            adapters = models.AdapterSwitch(policy)
            model = models.ActorCritic(policy, models.AdapterClassifier(policy, adapters, models.CRITIC), adapters)
            model.train_adapters()
        else:
            critic = classifier(job, job.value_model or job.policy) if has_critic else None
            model = models.ActorCritic(
                policy, critic, None if job.peft_config is None else models.AdapterSwitch(policy)
            )
        if args.disable_dropout:
            models.disable_dropout(model)
        reference = frozen(causal_lm(job, job.policy)) if has_reference else None
        rewards = [frozen(classifier(job, config)) for config in job.rewards]
        loaded = [frozen(classifier(job, each.config, each.dtype)) for each in job.loaded_rewards]
        return prepare(job, model), reference, rewards, loaded

    (model, reference, rewards, loaded), mode = memory.fake(build)
    critic_note = "an adapter on the policy's base" if shares_base else ""
    roles = [role_of(job, "policy", model.parameters_of("policy"), linear_weights(model.policy))]
    if has_critic:
        critic = role_of(job, "critic", model.parameters_of("critic"), note=critic_note)
        roles.append(replace(critic, on_base=shares_base))
    if reference is not None:
        roles.append(role_of(job, "reference", reference.parameters()))
    elif args.use_ref_model and job.ref_adapter:
        roles.append(_copied_adapter(job, roles[0]))
    elif args.use_ref_model:
        roles.append(Role("reference", note="the policy's base without its adapter", on_base=True))
    # The reference is the only frozen model that TRL has FSDP2 shard; it moves reward models whole to each GPU
    whole = "whole on each GPU: TRL has ZeRO-3 shard reward models, but not FSDP2" if layout.mode == "fsdp2" else ""
    for reward in rewards:
        roles.append(role_of(job, "reward model", reward.parameters(), note=whole, is_sharded=layout.mode == "zero3"))
    on_base = partial(Role, "reward model", note="an adapter on the policy's base", on_base=True)
    roles += [on_base() for _ in range(job.shared_rewards)]

    step = args.per_device_train_batch_size * args.gradient_accumulation_steps
    local = step * args.num_mini_batches
    rows = min(args.local_rollout_forward_batch_size, local)
    scorers = [(reward, rows) for reward in rewards]
    # Each process has all of a reward function's model; the members of an ensemble share a base
    for each, built in zip(job.loaded_rewards, loaded, strict=True):
        own = replace(job, bits=each.bits, nested=False)
        base = role_of(own, "reward function", built.parameters(), linear_weights(built), is_sharded=False)
        roles.append(replace(base, config=each.config))
        roles += [replace(base, config=each.config, weights=0)] * (each.members - 1)
        scorers.append((built, each.rows(local, length)))

    trains_apart = has_critic and layout.mode == "single"  # as [`PPOTrainer`] does

    def loss():
        batch = scored(memory.tokens(args.per_device_train_batch_size, length), args.max_completion_length)
        if trains_apart:
            model(**batch, with_logprobs=False, with_values=True)["values"].sum().backward()
        found = model(**batch, with_values=has_critic and not trains_apart, with_entropies=True)
        return sum(found[name].sum() for name in ("logprobs", "entropies", "values") if name in found)

    generates, beside = generation_phase(job, mode, model.policy, rows, local)
    phases = {
        "generate": generates,
        "score": scoring_phase(job, mode, model, reference, scorers, rows, length),
        **update_phases(job, mode, model, loss, roles),
    }
    episodes = local * layout.processes
    schedule = {
        "episodes per minibatch (optimizer step)": step * layout.processes,
        "episodes per rollout": episodes,
        "prompts per rollout": episodes // args.num_generations,
        "optimizer steps per rollout": args.steps_per_rollout,
        "tokens per rollout, at most": episodes * length,
        "generated tokens per rollout, at most": episodes * args.max_completion_length,
    }
    if job.turns > 1:
        schedule["turns of an episode, at most"] = job.turns
    if args.total_episodes:
        schedule["rollouts"] = math.ceil(args.total_episodes / episodes)
        schedule["optimizer steps"] = schedule["rollouts"] * args.steps_per_rollout
    return _finish(job, Plan(roles, phases, schedule, 0, beside=beside))


def _finish(job: Job, result: Plan) -> Plan:
    """Complete a plan: add the bytes of a checkpoint, and move offloaded bytes to the host; return the plan."""
    wide = job.layout.is_deepspeed  # its checkpoint has a copy of the weights in float32
    size = job.compute_dtype.itemsize if wide else job.dtype.itemsize
    for role in result.roles:
        state = memory.optimizer_bytes(role.trained, 4 if wide else size, job.args.optim)
        result.checkpoint += role.trained * (size + 4 * wide) + state
        if job.layout.offloads_optimizer:
            result.host = result.host + role.optimizer
            role.optimizer = 0
        if job.layout.offloads_weights:
            result.host = result.host + role.weights
            role.weights = 0
    if getattr(job.args, "save_in_background", False):  # a copy; without DeepSpeed the first process writes all
        result.host += memory.share(result.checkpoint, job.layout.processes if wide else 1)
    return result


# ---- Models ----


def causal_lm(job: Job, config: Any, outputs: tuple[str, ...] = ("log_probs",)) -> Any:
    """
    Return a language model built from its configuration, in the job's dtype, with TRL's fused LM head that computes
    `outputs`.
    """
    model = AutoModelForCausalLM.from_config(config, dtype=job.compute_dtype)
    models.add_fused_lm_head(model, outputs=outputs)
    return model


def classifier(job: Job, config: Any, dtype: torch.dtype | None = None) -> Any:
    """
    Return a sequence classifier with one label, built from its configuration. Its dtype is `job.compute_dtype` if
    `dtype` is None.
    """
    given = {name: value for name, value in config.to_dict().items() if name not in ("id2label", "label2id")}
    config = type(config)(**{**given, "num_labels": 1, "pad_token_id": config.pad_token_id or 0})
    return AutoModelForSequenceClassification.from_config(config, dtype=dtype or job.compute_dtype)


def frozen(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False).eval()


def adapted(job: Job, model: Any) -> Any:
    """Add the job's adapter to a model, in TRL's dtype for adapters; return the model unchanged if there is none."""
    if job.peft_config is None:
        return model
    model = get_peft_model(
        model, job.peft_config, autocast_adapter_dtype=job.bits is None and job.layout.mode != "zero3"
    )
    for parameter in model.parameters() if job.bits else ():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    return model


def prepare(job: Job, model: Any) -> Any:
    """Return the model in training mode, with activation checkpointing if the job's arguments ask for it."""
    if job.args.activation_checkpointing:
        kwargs = dict(job.args.activation_checkpointing_kwargs or {"use_reentrant": False})
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
        if job.peft_config is not None:
            models.base_model_of(getattr(model, "policy", model)).enable_input_require_grads()
    return model.train()


def numel(*modules: nn.Module | None) -> int:
    """Return the number of weights of these modules."""
    return sum(p.numel() for module in modules if module is not None for p in module.parameters())


def linear_weights(model: nn.Module) -> frozenset[int]:
    """Return the `id` of each weight that bitsandbytes quantises: of frozen linear layers, but not of output heads."""
    return frozenset(
        id(module.weight)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not module.weight.requires_grad and name.split(".")[-1] not in _HEADS
    )


def role_of(
    job: Job,
    name: str,
    parameters: Iterable[nn.Parameter],
    quantized: frozenset[int] = frozenset(),
    note: str = "",
    *,
    is_sharded: bool = True,
) -> Role:
    """
    Count the bytes of weights, gradients and optimizer state that one model keeps on one GPU.

    Args:
        job: the run.
        name: name of the role.
        parameters: parameters of the model; tied weights count once.
        quantized: the `id` of each weight that a quantised base stores in `job.bits` bits, see [`linear_weights`].
        note: text to show beside the role.
        is_sharded: whether the model's weights are sharded where the run's layout is ZeRO-3 or FSDP2.
    """
    layout = job.layout
    optim = job.args.optim
    parameters = list({id(p): p for p in parameters}.values())
    trained = [p for p in parameters if p.requires_grad]
    quantized = quantized if job.bits else frozenset()
    small = sum(p.numel() for p in parameters if id(p) in quantized)
    weights = memory.quantized_bytes(small, job.bits or 8, job.nested)
    weights += sum(p.nbytes for p in parameters if id(p) not in quantized)
    gradients = sum(p.nbytes for p in trained)
    count = sum(p.numel() for p in trained)
    if layout.is_deepspeed:  # a float32 copy of the weights, and the optimizer's moments
        state = count * 4 + memory.optimizer_bytes(count, 4, optim)
    elif layout.mode == "fsdp2" and job.mixed is not None:  # accelerate keeps trained weights in float32
        weights += count * 4 - gradients
        gradients = count * 4
        state = memory.optimizer_bytes(count, 4, optim)
    else:
        state = sum(memory.optimizer_bytes(p.numel(), p.element_size(), optim) for p in trained)
    if layout.mode == "ddp":
        gradients *= 2  # DDP's buckets hold them once more
    if layout.shards_weights and is_sharded:
        weights = memory.share(weights, layout.processes)
    if layout.shards_gradients:
        gradients = memory.share(gradients, layout.processes)
    if layout.shards_optimizer:
        state = memory.share(state, layout.processes)
    return Role(name, sum(p.numel() for p in parameters), count, weights, gradients, state, note)


def _copied_adapter(job: Job, policy: Role) -> Role:
    """Return the role of the reference in a job that continues an adapter: a copy of the adapter of `policy`."""
    weights = memory.share(
        policy.trained * job.dtype.itemsize, job.layout.processes if job.layout.shards_weights else 1
    )
    return Role("reference", policy.trained, weights=weights, note="a copy of the policy's adapter", on_base=True)


# ---- Phases: bytes beside weights and optimizer state ----


def generation_phase(job: Job, mode: Any, policy: Any, rows: int, local: int) -> tuple[dict[str, int], dict[str, int]]:
    """
    Return the bytes that generation takes, by purpose, in two dictionaries: of the trainer, and of vLLM.
    Only one of them generates; the dictionary of the other is empty.

    vLLM is counted apart from the trainer, also where it runs in the trainer's process, with weights and KV cache in
    16 bits. TRL lets vLLM generate `max_completion_length` tokens in each turn, after the prompt and earlier turns,
    and cuts answers that are too long afterwards. Without vLLM, a second KV cache of the same size is counted if there
    are several turns.

    Args:
        job: the run.
        mode, policy: the mode and the policy that [`fake`] returned.
        rows: number of answers that are generated at once without vLLM.
        local: number of answers of a rollout on this process; vLLM's KV cache is counted for all of them (it also runs
            with a smaller one).
    """
    config = models.base_model_of(policy).config.get_text_config()
    width = job.compute_dtype.itemsize
    if job.args.use_vllm:
        length = job.longest_history + job.args.max_completion_length
        weights = sum(p.numel() for name, p in policy.named_parameters() if "lora_" not in name)
        return {}, {"weights": 2 * weights, "KV cache": memory.kv_cache_bytes(config, local, length, 2)}
    # Without gradients no layer's activations are kept
    depth = config.num_hidden_layers
    config.num_hidden_layers = 2
    policy.eval()
    # Without autocast, since accelerate puts autocast on the actor-critic's forward only, not on the policy's
    prefill = memory.forward_peak(
        mode, policy, lambda: policy(**memory.tokens(rows, job.longest_history), logits_to_keep=1, use_cache=False)
    )
    policy.train()
    config.num_hidden_layers = depth
    gathered = _gathered(job, policy)
    if job.layout.shards_weights and job.args.ds3_gather_for_generation:  # the whole policy, once per rollout
        gathered = numel(policy) * width
    cache = memory.kv_cache_bytes(config, rows, job.prompt_length + job.args.max_completion_length, width)
    return {
        "KV cache": (1 + (job.turns > 1)) * cache,
        "logits": 3 * rows * config.vocab_size * 4,  # raw, scaled, and as probabilities
        "activations": prefill,
        "gathered weights": gathered,
    }, {}


def scoring_phase(
    job: Job, mode: Any, model: Any, reference: Any, rewards: list[tuple[Any, int]], rows: int, length: int
) -> dict[str, int]:
    """
    Return the bytes that it takes to compute a rollout's log-probs, values and rewards, by purpose.

    The reference's activations are not counted, since they are fewer than the policy's and the critic's.

    Args:
        job: the run.
        mode, model, reference: the mode, the actor-critic and the reference (or None) that [`fake`] returned.
        rewards: each reward model with the number of rows that it reads at once; rows are cut to its maximum length.
        rows, length: number of rows that the actor-critic reads at once, and number of tokens of each.
    """
    with mode:
        answers = scored(memory.tokens(rows, length), job.args.max_completion_length)
    model.eval()
    peaks = [memory.forward_peak(mode, model, lambda: model(**answers, with_values=True), job.autocast)]
    model.train()
    for reward, most in rewards:
        with mode:
            batch = memory.tokens(most, min(length, models.context_of(reward)))
        peaks.append(memory.forward_peak(mode, reward, partial(reward, **batch)))
    return {"activations": max(peaks), "gathered weights": _gathered(job, model, reference)}


def scored(batch: dict[str, Tensor], width: int) -> dict[str, Tensor]:
    """
    Return the batch with what the actor-critic needs for the log-probs and values of each row's last `width` tokens.

    Two tensors are added, (rows · width,): `targets`, the ids of these tokens; and `predicts`, the index of the token
    before each, in the flat batch.
    """
    rows, length = batch["input_ids"].shape
    predicts = torch.arange(rows)[:, None] * length + torch.arange(length - width - 1, length - 1)
    return {**batch, "predicts": predicts.flatten(), "targets": batch["input_ids"][:, -width:].flatten()}


def update_phases(
    job: Job, mode: Any, model: Any, loss: Callable[[], Tensor], roles: list[Role], *others: Any
) -> dict[str, dict[str, int]]:
    """
    Return the bytes of two phases, by purpose: `update`, a micro-batch's forward and backward pass, and `step`, the
    optimizer's step.

    Args:
        job: the run.
        mode, model: the mode and the model that [`fake`] returned.
        loss: a function that computes the loss of a micro-batch.
        roles: the models of the run, whose gradients count.
        *others: frozen models that `loss` uses.
    """
    gradients = sum(role.gradients for role in roles)
    accumulates = job.args.gradient_accumulation_steps > 1
    kind = "sharded" if job.layout.shards_gradients else "kept" if accumulates else "fresh"
    peak = memory.training_peak(mode, model, loss, job.autocast, kind, tuple(others))
    whole = 0 if kind == "sharded" else sum(p.nbytes for p in model.parameters() if p.requires_grad)
    update = {
        "gradients": gradients - max(0, whole - peak),  # those that the pass's peak has, and DDP's buckets
        "activations": max(0, peak - whole),
        "gathered weights": _gathered(job, model, *others),
    }
    if job.bits:
        quantized = linear_weights(model)
        update["dequantised layer"] = 2 * max(p.numel() for p in model.parameters() if id(p) in quantized)
    step = {"gradients": gradients, "temporary": gradients if job.args.optim == "adamw_torch" else 0}
    return {"update": update, "step": step}


def _gathered(job: Job, model: nn.Module, *frozen: nn.Module | None) -> int:
    """Return the bytes of sharded weights that each GPU gathers to run these models; 0 if weights are not sharded."""
    if job.layout.mode == "zero3":
        count = min(job.layout.live_parameters, numel(model, *frozen))
    elif job.layout.mode == "fsdp2":
        # The root's own weights (embeddings and heads) stay gathered. Beside them are gathered the present layer and
        # the next one, or the reference, which TRL shards in one piece: whichever is larger
        layers = [*map(numel, sharded_layers(model))]
        beside = max(2 * max(layers, default=0), *map(numel, frozen), 0)
        count = numel(model) - sum(layers) + beside
    else:
        return 0
    return count * job.compute_dtype.itemsize


def sharded_layers(model: Any) -> list[nn.Module]:
    """Return the layers of policy and critic that FSDP2 shards one by one; the root module holds all other weights."""
    kinds = getattr(model, "_no_split_modules", None) or ()
    return [module for module in model.modules() if type(module).__name__ in kinds]
