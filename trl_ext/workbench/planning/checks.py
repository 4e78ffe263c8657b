"""Find settings that cannot work together, and settings that are known to end badly."""

from typing import Any

import torch

from ...ppo import check_roles
from .layout import Layout
from .runs import Job


def known_not_to_work(job: Job) -> list[str]:
    """
    Return a sentence for each reason why a run cannot work.

    Settings that the run's configuration class refuses itself are not checked here.
    """
    args, layout, peft = job.args, job.layout, job.peft_config is not None
    reasons = []
    if job.bits and job.stage == "pretrain_critic":
        reasons.append(f"a critic cannot be trained alone on a base in {job.bits} bits: do not quantise the base")
    elif job.bits and not peft:
        reasons.append(f"a base in {job.bits} bits cannot be trained: set `use_peft: true`, or do not quantise it")
    if job.bits and job.stage == "reward" and not args.bf16:
        reasons.append("a quantised base needs `bf16: true`, since TRL keeps its score head in bfloat16")
    if job.dtype == torch.float16 and not peft:
        reasons.append("weights in float16 cannot be trained, their gradients underflow: set `dtype: float32`")
    if layout.accumulation not in (None, args.gradient_accumulation_steps):
        reasons.append(
            f"accelerate's file sets gradient_accumulation_steps to {layout.accumulation}, the recipe to "
            f"{args.gradient_accumulation_steps}: write `auto` in accelerate's file"
        )
    if layout.checkpoints_activations and args.activation_checkpointing:
        reasons.append(
            "`fsdp_activation_checkpointing` and `activation_checkpointing` are both on: turn the first one off"
        )
    if job.stage == "ppo":
        reasons += _ppo(job, args, layout, peft)
    return reasons


def _ppo(job: Job, args: Any, layout: Layout, peft: bool) -> list[str]:
    reasons = []
    try:
        check_roles("", args, [], None if job.value_model is None else "", job.peft_config, None)
    except ValueError as error:
        reasons.append(str(error))
    if peft and layout.checkpoints_activations:
        reasons.append(
            "FSDP's own activation checkpointing replays layers with the adapter that is active by then, which gives "
            "wrong gradients: set `fsdp_activation_checkpointing: false` in accelerate's file, and "
            "`activation_checkpointing: true` in the recipe"
        )
    if layout.is_deepspeed and args.leaves_steps_out:
        reasons.append(
            "`critic_warmup_rollouts` and `max_approx_kl` skip optimizer steps, but DeepSpeed's "
            "engine steps inside `backward`: use DDP or FSDP2, or leave these settings out"
        )
    if job.turns > 1 and args.rollouts_ahead:
        reasons.append(
            f"`rollouts_ahead: {args.rollouts_ahead}` draws whole rollouts in advance, which tools and environments "
            "do not allow: leave it out"
        )
    episodes = args.per_device_train_batch_size * args.steps_per_generation * layout.processes
    if episodes % args.num_generations:
        reasons.append(
            f"`num_generations: {args.num_generations}` does not divide the {episodes} episodes of a rollout on "
            f"{layout.processes} processes: change one of them"
        )
    if args.use_vllm and args.vllm_mode == "colocate" and layout.processes % args.vllm_tensor_parallel_size:
        reasons.append(
            f"`vllm_tensor_parallel_size: {args.vllm_tensor_parallel_size}` does not divide the {layout.processes} "
            "processes: change one of them"
        )
    return reasons


def known_to_go_wrong(
    job: Job,
    pairs: int | None = None,
    shared_prompts: str | None = None,
    score_range: tuple[float, float] | None = None,
) -> list[str]:
    """
    Return a sentence for each choice of settings or data that is likely to make a run end badly.

    Args:
        job: the run.
        pairs: number of preference pairs that the run trains on, if known.
        shared_prompts: a sentence on the prompts that SFT and PPO share, if they share any.
        score_range: lowest and highest score that the rewards give, if known.
    """
    args, warnings = job.args, []
    if job.stage in ("reward", "dpo") and pairs is not None and pairs < 10_000:
        warnings.append(
            f"{pairs} preference pairs: with fewer than 10,000, a reward model or DPO mostly memorises the pairs"
        )
    if job.stage != "ppo":
        return warnings
    warnings += _too_long(job)
    if args.kl_coef == 0 and not job.only_environment:
        warnings.append(
            "`kl_coef: 0`: without a KL penalty the policy ends up saying what the reward model likes by mistake"
        )
    if args.vf_coef == 0:
        warnings.append("`vf_coef: 0`: the critic never learns, and the advantages stay as noisy as the returns")
    low, high = score_range or args.reward_clip_range or (float("-inf"), float("inf"))
    is_raw = score_range is None or args.reward_normalization == "none"
    if low >= 0 and high <= 1 and is_raw and 0 < args.kl_coef < 0.1:
        warnings.append(
            f"scores in [{low:g}, {high:g}] with `kl_coef: {args.kl_coef:g}`: with so small a KL penalty the policy "
            "drifts without a gain; raise `kl_coef` to 0.1 or more, or normalise the scores"
        )
    if shared_prompts:
        warnings.append(
            f"{shared_prompts}: SFT has memorised their answers, so the policy has little left to explore there"
        )
    return warnings


def _too_long(job: Job) -> list[str]:
    """
    Return a warning for each model that reads fewer tokens than the longest prompt with its answer has.

    No part of the run truncates a prompt with its answer, and some models refuse one that is too long.
    """
    length = job.prompt_length + job.args.max_completion_length
    limits = {
        f"the {whose} reads": getattr(config.get_text_config(), "max_position_embeddings", None)
        for whose, config in (
            ("policy", job.policy),
            *(("reward model", reward) for reward in job.rewards),
            *(("reward function's model", each.config) for each in job.loaded_rewards),
        )
    }
    if job.args.use_vllm and job.args.vllm_mode == "colocate":
        limits["`vllm_max_model_length` is"] = job.args.vllm_max_model_length
    return [
        f"{limit} {most} tokens, but a prompt of {job.prompt_length} with its answer has up to {length}: leave out "
        f"prompts of more than {most - job.args.max_completion_length} tokens"
        for limit, most in limits.items()
        if most and length > most
    ]
