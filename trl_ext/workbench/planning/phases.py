"""Count the bytes that generating, scoring, updating and stepping take beside weights and optimizer state."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...models import base_model_of
from .memory import kv_cache_of
from .roles import linear_weights
from .runs import Job, Role
from .simulate import forward_peak, tokens, training_peak


def generation_phase(job: Job, mode: Any, policy: Any, rows: int, local: int) -> tuple[dict[str, int], dict[str, int]]:
    """
    Return two dictionaries, purpose → bytes of generation: in the run itself, and in a process beside it.

    vLLM generates beside the run. It is counted with weights and KV cache in 16 bits, and with a
    cache for all `local` answers of a rollout at once, though it works with less. TRL lets vLLM draw
    `max_completion_length` tokens after the history in each turn, and cuts what is too long afterwards. Without vLLM,
    `rows` answers are generated at once; with several turns, a second KV cache of the same size is counted.
    """
    config = base_model_of(policy).config.get_text_config()
    longest = job.prompt_length + job.args.max_completion_length
    numel = sum(p.numel() for name, p in policy.named_parameters() if "lora_" not in name)
    if job.args.use_vllm:
        length = job.longest_history + job.args.max_completion_length
        return {}, {"weights": 2 * numel, "KV cache": kv_cache_of(config, local, length, 2)}
    # Without gradients no layer's activations are kept
    depth, config.num_hidden_layers = config.num_hidden_layers, 2
    policy.eval()
    # Without autocast, since accelerate puts autocast on the actor-critic's forward only, not on the policy's
    prefill = forward_peak(
        mode, policy, lambda: policy(**tokens(rows, job.longest_history), logits_to_keep=1, use_cache=False)
    )
    policy.train()
    config.num_hidden_layers = depth
    gathered = _gathered(job, policy)
    if job.layout.shards_weights and job.args.ds3_gather_for_generation:  # the whole policy, once per rollout
        gathered = sum(p.numel() for p in policy.parameters()) * job.compute_dtype.itemsize
    parts = {
        "KV cache": (1 + (job.turns > 1)) * kv_cache_of(config, rows, longest, job.compute_dtype.itemsize),
        "logits": 3 * rows * config.vocab_size * 4,  # raw, scaled, and as probabilities
        "activations": prefill,
    }
    return {**parts, "gathered weights": gathered}, {}


def scoring_phase(
    job: Job,
    mode: Any,
    model: Any,
    reference: Any,
    rewards: list,
    rows: int,
    length: int,
    loaded: list[tuple[Any, int]],
) -> dict[str, int]:
    """
    Return the bytes that a rollout's log-probs, values and rewards take to compute, as a dictionary purpose → bytes.

    The reference's activations are not counted: they are fewer than the policy's and the critic's. `loaded` lists the
    models that reward functions load, each with the number of rows that it reads at once.
    """
    with mode:
        batch = tokens(rows, length)
        answers = scored(batch, job.args.max_completion_length)
    model.eval()
    peaks = [forward_peak(mode, model, lambda: model(**answers, with_values=True), job.autocast)]
    model.train()
    for reward in rewards:
        if type(reward.config) is type(job.policy) and reward.config.hidden_size <= job.policy.hidden_size:
            continue  # this reward model takes no more than the policy
        peaks.append(_reads(mode, reward, batch))
    for reward, most in loaded:
        with mode:
            batch = tokens(most, length)
        peaks.append(_reads(mode, reward, batch))
    return {"activations": max(peaks), "gathered weights": _gathered(job, model, reference)}


def _reads(mode: Any, reward: Any, batch: dict[str, Tensor]) -> int:
    """Return the peak bytes of a reward model's forward pass on `batch`, cut to the model's maximum length."""
    limit = getattr(reward.config, "max_position_embeddings", None)
    cut = {name: values[:, :limit] for name, values in batch.items()}
    return forward_peak(mode, reward, partial(reward, **cut))


def scored(batch: dict[str, Tensor], width: int) -> dict[str, Any]:
    """
    Return the batch with two more entries, `predicts` and `targets`.

    They tell the actor-critic to score the last `width` tokens of each row.
    """
    rows, length = batch["input_ids"].shape
    predicts = torch.arange(rows)[:, None] * length + torch.arange(length - width - 1, length - 1)
    return {**batch, "predicts": predicts.flatten(), "targets": batch["input_ids"][:, -width:].flatten()}


def update_phases(
    job: Job, mode: Any, model: Any, loss: Callable[[], Tensor], roles: list[Role], *others: Any
) -> dict:
    """
    Return the bytes of two phases, each as a dictionary purpose → bytes.

    `update` is the forward and backward pass of one micro-batch, and `step` is the optimizer's step.
    """
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
        quantized = linear_weights(model)
        update["dequantised layer"] = 2 * max(p.numel() for p in model.parameters() if id(p) in quantized)
    step = {"gradients": gradients, "temporary": gradients if job.optim == "adamw_torch" else 0}
    return {"update": update, "step": step}


def _gathered(job: Job, model: nn.Module, *frozen: nn.Module | None) -> int:
    """Return the bytes of weights that each GPU gathers to compute with, if they are sharded; 0 if they are not."""
    others = [sum(p.numel() for p in each.parameters()) for each in frozen if each is not None]
    numel = sum(p.numel() for p in model.parameters())
    if job.layout.mode == "zero3":
        numel = min(job.layout.live_parameters, numel + sum(others))
    elif job.layout.mode == "fsdp2":
        # The root's own weights (embeddings and heads) stay gathered. Beside them are gathered the present layer and
        # the next one, or the reference, which TRL shards in one piece: whichever is larger
        layers = [sum(p.numel() for p in layer.parameters()) for layer in _layers(model)]
        numel += max(2 * max(layers, default=0), *others, 0) - sum(layers)
    else:
        return 0
    return numel * job.compute_dtype.itemsize


def _layers(model: Any) -> list[nn.Module]:
    """Return the layers of policy and critic that FSDP2 shards one by one; the root holds all other weights."""
    kinds = getattr(model, "_no_split_modules", None) or ()
    return [module for module in model.modules() if type(module).__name__ in kinds]
