"""Estimate how long a run takes, from its arithmetic and the bytes that generation reads."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .memory import kv_cache_bytes
from .runs import Job, Plan, Role


class GPU(NamedTuple):
    """
    Describe a GPU by its vendor's figures.

    Args:
        name: name of a common GPU of that size.
        memory: GB, as it is sold.
        tflops: 10¹² operations a second in bfloat16, without sparsity.
        bandwidth: 10¹² bytes a second.
    """

    name: str
    memory: int
    tflops: float
    bandwidth: float


GPUS = (
    GPU("RTX 3060", 12, 51, 0.36),
    GPU("RTX 4080", 16, 97, 0.72),
    GPU("RTX 4090", 24, 165, 1.01),
    GPU("A100", 40, 312, 1.56),
    GPU("L40S", 48, 362, 0.86),
    GPU("H100", 80, 989, 3.35),
    GPU("H200", 141, 989, 4.8),
    GPU("B200", 180, 2250, 8.0),
)


@dataclass(frozen=True)
class Efficiency:
    """
    Hold assumptions on how much of a GPU's nominal speed a run reaches.

    Args:
        mfu: share of the GPU's operations a second that forward and backward passes reach.
        bandwidth: share of the GPU's bandwidth that the generation of tokens reaches.
        layer_ms: milliseconds that Python needs for one layer and one generated token, however many rows are generated
            at once. Without this time the estimate for small models would be far too short. vLLM needs a tenth of it.
        scaling: share of its speed that each GPU keeps if there are several.
    """

    mfu: float = 0.35
    bandwidth: float = 0.6
    layer_ms: float = 0.8
    scaling: float = 0.9


def seconds_per_example(
    job: Job, plan: Plan, gpu: GPU, efficiency: Efficiency, tokens: float | None = None
) -> dict[str, float]:
    """
    Return phase → seconds that one GPU spends on an example, which is a row, a pair, or an episode of PPO.

    A forward pass takes 2 operations for each weight and token, and for attention 2 · layers · width · length more for
    each token. A backward pass takes twice as many operations as a forward pass, or equally many if most weights are
    frozen. Activation checkpointing adds one forward pass.

    Args:
        job, plan: the run, and its plan.
        gpu, efficiency: the GPU's nominal speed, and how much of it the run reaches.
        tokens: number of tokens of one text; None takes the longest text allowed.
    """
    args, policy = job.args, plan.roles[0]
    is_ppo = job.stage == "ppo"
    length = tokens or (job.prompt_length + args.max_completion_length if is_ppo else job.length)
    rate = gpu.tflops * 1e12 * efficiency.mfu
    if job.mixed is None and job.dtype == torch.float32:
        rate /= 16  # without tensor cores

    def forward(role: Role) -> float:
        config = job.rewards[0] if role.name == "reward model" and is_ppo and job.rewards else job.policy
        weights = policy.parameters if role.note else role.parameters  # a note: it runs on the policy's base
        return _forward((role.config or config).get_text_config(), weights, length) / rate

    def update(role: Role) -> float:
        is_frozen = role.trained < policy.parameters / 2
        return forward(role) * ((2 if is_frozen else 3) + bool(args.activation_checkpointing))

    trained = [role for role in plan.roles if role.trained]
    if not is_ppo:
        texts = 2 if job.stage in ("dpo", "reward") else 1
        # DPO's reference is read once, also where that is precomputed
        return {"update": texts * (update(trained[0]) + (job.stage == "dpo") * forward(policy))}
    return {
        "generate": _generation(job, plan, gpu, efficiency, rate),
        "score": sum(forward(role) for role in plan.roles if args.baseline != "mean" or role.name != "critic"),
        "update": args.num_ppo_epochs * sum(map(update, trained)),
    }


def examples(job: Job, plan: Plan, rows: int | None) -> float | None:
    """Return the number of examples of the whole run; None if it depends on the data's `rows`, and `rows` is None."""
    args, is_ppo = job.args, job.stage == "ppo"
    if is_ppo and args.total_episodes:
        return args.total_episodes
    if args.max_steps > 0 and is_ppo:
        return args.max_steps / plan.schedule["optimizer steps per rollout"] * plan.schedule["episodes per rollout"]
    if args.max_steps > 0:
        return args.max_steps * plan.schedule["examples per optimizer step"]
    return rows and rows * args.num_train_epochs * (args.num_generations if is_ppo else 1)


def hours(job: Job, plan: Plan, gpu: GPU, efficiency: Efficiency, count: float, tokens: float | None = None) -> float:
    """Return the hours of a run of `count` examples, on all GPUs of its layout."""
    phases, processes = seconds_per_example(job, plan, gpu, efficiency, tokens), job.layout.processes
    seconds = sum(phases.values())
    if job.stage == "ppo" and job.args.rollouts_ahead:  # generation and the rest overlap: only the longer one counts
        seconds = max(phases["generate"], phases["score"] + phases["update"])
    return count * seconds / (processes * (efficiency.scaling if processes > 1 else 1)) / 3600


def _forward(config: Any, weights: int, length: float) -> float:
    lookups = 0 if getattr(config, "tie_word_embeddings", False) else config.vocab_size * config.hidden_size
    attention = 2 * config.num_hidden_layers * config.hidden_size * length
    return length * (2 * max(weights - lookups, 0) + attention)


def _generation(job: Job, plan: Plan, gpu: GPU, efficiency: Efficiency, rate: float) -> float:
    config, args, weights = job.policy.get_text_config(), job.args, plan.roles[0].parameters
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.num_mini_batches
    rows = rows if args.use_vllm else min(args.local_rollout_forward_batch_size, rows)
    width = job.compute_dtype.itemsize
    read = weights * (job.bits / 8 if job.bits else width)
    read += kv_cache_bytes(config, rows, int(job.prompt_length + args.max_completion_length / 2), width)
    step = read / (gpu.bandwidth * 1e12 * efficiency.bandwidth)
    step += config.num_hidden_layers * efficiency.layer_ms / 1000 * (0.1 if args.use_vllm else 1)
    # As if each turn read its history anew: the prompt, and the share of the answer that the turns before it made
    turns = [job.prompt_length + args.max_completion_length * turn / job.turns for turn in range(job.turns)]
    prefill = sum(_forward(config, weights, length) for length in turns)
    return args.max_completion_length * step / rows + prefill / rate
