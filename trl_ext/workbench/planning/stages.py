"""Plan each training stage: its roles, phases, schedule and disk."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...models import (
    CRITIC,
    ActorCritic,
    AdapterClassifier,
    AdapterSwitch,
    add_critic,
    add_dense_lm_head,
    add_value_forward,
)
from .memory import optimizer_bytes, share
from .phases import generation_phase, scored, scoring_phase, update_phases
from .roles import adapted, causal_lm, classifier, linear_weights, loaded_roles, prepare, role_of
from .runs import Job, Plan, Role
from .simulate import fake, tokens


def plan(job: Job) -> Plan:
    """Plan a run, by running each of its passes once on tensors without data."""
    plans = {"sft": _plan_sft, "reward": _plan_reward, "pretrain_critic": _plan_critic, "dpo": _plan_dpo}
    return (plans | {"ppo": _plan_ppo})[job.stage](job)


def _plan_sft(job: Job) -> Plan:
    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return model(**batch, labels=batch["input_ids"], fused_lm_head=True).loss

    return _plan_one_model(job, "model", lambda: adapted(job, causal_lm(job, job.policy)), loss)


def _plan_reward(job: Job) -> Plan:
    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return model(**batch).logits.sum()

    return _plan_one_model(job, "reward model", lambda: _adapted_classifier(job), loss, texts=2)


def _plan_critic(job: Job) -> Plan:
    def build() -> Any:
        critic = _adapted_classifier(job)
        add_value_forward(critic)
        return critic

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return model(**batch, predicts=torch.arange(batch["input_ids"].numel()))["values"].sum()

    return _plan_one_model(job, "critic", build, loss)


def _adapted_classifier(job: Job) -> Any:
    if job.peft_config is not None:
        job.peft_config.task_type = "SEQ_CLS"
    return adapted(job, classifier(job, job.policy))


def _plan_one_model(
    job: Job, name: str, build: Callable[[], Any], loss: Callable[[Any, dict[str, Tensor]], Tensor], texts: int = 1
) -> Plan:
    """
    Plan a stage that trains one model and needs no other.

    Args:
        job: the run.
        name: what the plan calls the model.
        build: builds the model.
        loss: computes the loss of the model on a batch of token ids.
        texts: number of texts in one example: 2 for a pair.
    """
    model, mode = fake(lambda: prepare(job, build()))
    roles, rows = [role_of(job, name, model.parameters(), linear_weights(model))], job.args.per_device_train_batch_size
    phases = update_phases(job, mode, model, lambda: loss(model, tokens(texts * rows, job.length)), roles)
    return _finish(job, roles, phases, _schedule(job, texts, job.length))


def _plan_dpo(job: Job) -> Plan:
    rows, length = 2 * job.args.per_device_train_batch_size, job.length
    has_reference = (job.peft_config is None and not job.args.precompute_ref_log_probs) or job.ref_model

    def build():
        model = prepare(job, adapted(job, causal_lm(job, job.policy)))
        reference = causal_lm(job, job.policy).requires_grad_(False).eval() if has_reference else None
        return model, reference

    (model, reference), mode = fake(build)
    roles = [role_of(job, "policy", model.parameters(), linear_weights(model))]
    if reference is not None:
        roles.append(role_of(job, "reference", reference.parameters()))
    elif job.ref_adapter:
        roles.append(_copied_adapter(job, roles[0]))

    def loss():
        batch = tokens(rows, length)
        batch["labels"] = batch["input_ids"]
        value = model(**batch, fused_lm_head=True).log_probs.sum()
        if not job.args.precompute_ref_log_probs:
            with torch.no_grad():
                (model if reference is None else reference)(**batch, fused_lm_head=True)
        return value

    others = () if reference is None else (reference,)
    return _finish(job, roles, update_phases(job, mode, model, loss, roles, *others), _schedule(job, 2, length))


def _plan_ppo(job: Job) -> Plan:
    args, layout = job.args, job.layout
    length = job.prompt_length + args.max_completion_length
    has_reference = args.use_ref_model and (job.peft_config is None or job.ref_model)
    shares_base = job.peft_config is not None and job.value_model is None

    def build():
        policy = causal_lm(job, job.policy, ("log_probs", "entropy"))
        add_dense_lm_head(policy, budget_gb=args.logits_budget_gb)
        policy = adapted(job, policy)
        if shares_base:
            add_critic(policy, None)
            adapters = AdapterSwitch(policy)
            model = ActorCritic(policy, AdapterClassifier(policy, adapters, CRITIC), adapters)
            model.train_adapters()
        else:
            critic = classifier(job, job.value_model or job.policy)
            model = ActorCritic(policy, critic, None if job.peft_config is None else AdapterSwitch(policy))
        if args.baseline == "mean":
            model.freeze_critic()
        reference = causal_lm(job, job.policy).requires_grad_(False).eval() if has_reference else None
        rewards = [classifier(job, config).requires_grad_(False).eval() for config in job.rewards]
        loaded = [classifier(job, each.config, each.dtype).requires_grad_(False).eval() for each in job.loaded_rewards]
        return prepare(job, model), reference, rewards, loaded

    (model, reference, rewards, loaded), mode = fake(build)
    quantized = linear_weights(model.policy)
    critic_note = "an adapter on the policy's base" if shares_base else ""
    roles = [
        role_of(job, "policy", model.parameters_of("policy"), quantized),
        role_of(job, "critic", model.parameters_of("critic"), note=critic_note),
    ]
    if reference is not None:
        roles.append(role_of(job, "reference", reference.parameters()))
    elif args.use_ref_model and job.ref_adapter:
        roles.append(_copied_adapter(job, roles[0]))
    elif args.use_ref_model:
        roles.append(Role("reference", 0, 0, 0, 0, 0, "the policy's base without its adapter"))
    # The reference is the only frozen model that TRL has FSDP2 shard; it moves reward models whole to each GPU
    whole = "whole on each GPU: TRL has ZeRO-3 shard reward models, but not FSDP2" if layout.mode == "fsdp2" else ""
    for reward in rewards:
        is_sharded = layout.mode == "zero3"
        roles.append(role_of(job, "reward model", reward.parameters(), note=whole, is_sharded=is_sharded))
    for _ in range(job.shared_rewards):
        roles.append(Role("reward model", 0, 0, 0, 0, 0, "an adapter on the policy's base"))

    step = args.per_device_train_batch_size * args.gradient_accumulation_steps
    local = step * args.num_mini_batches
    rows, read = min(args.local_rollout_forward_batch_size, local), []
    for each, built in zip(job.loaded_rewards, loaded, strict=True):
        roles += loaded_roles(each, built)
        read.append((built, each.rows(local, length)))

    def loss():
        batch = scored(tokens(args.per_device_train_batch_size, length), args.max_completion_length)
        found = model(**batch, with_values=args.baseline != "mean", with_entropies=True)
        return sum(found[name].sum() for name in ("logprobs", "entropies", "values") if name in found)

    generates, beside = generation_phase(job, mode, model.policy, rows, local)
    phases = {
        "generate": generates,
        "score": scoring_phase(job, mode, model, reference, rewards, rows, length, read),
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
        rollouts = math.ceil(args.total_episodes / episodes)
        schedule |= {"rollouts": rollouts, "optimizer steps": rollouts * schedule["optimizer steps per rollout"]}
    result = _finish(job, roles, phases, schedule)
    result.beside = beside
    return result


def _copied_adapter(job: Job, policy: Role) -> Role:
    """Return the reference's role if training continues an adapter: a copy of that adapter, on the policy's base."""
    processes = job.layout.processes if job.layout.shards_weights else 1
    weights = share(policy.trained * job.dtype.itemsize, processes)
    return Role("reference", policy.trained, 0, weights, 0, 0, "a copy of the policy's adapter")


def _finish(job: Job, roles: list[Role], phases: dict, schedule: dict[str, int]) -> Plan:
    """Return the run's plan, after moving offloaded bytes to the host and counting the bytes of a checkpoint."""
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
    if getattr(job.args, "save_in_background", False):  # a copy; without DeepSpeed the first process writes all
        host += share(state, job.layout.processes) if job.layout.is_deepspeed else state
    return Plan(roles, phases, schedule, state, host)


def _schedule(job: Job, rows_per_example: int, length: int) -> dict[str, int]:
    """Return the batch sizes of a stage without rollouts."""
    args = job.args
    step = args.per_device_train_batch_size * args.gradient_accumulation_steps * job.layout.processes
    return {
        "examples per optimizer step": step,
        "tokens per optimizer step, at most": step * rows_per_example * length,
    }
