"""The schedule that is printed at the start of a run."""

import math
from typing import Any

from ..models.weights import size_of


def schedule(trainer: Any) -> str:
    """Say what will be trained, how long, and in which portions."""
    args, actor_critic, rows = trainer.args, trainer.model, len(trainer.train_dataset)
    rollouts = rows * trainer.num_generations // args.batch_size
    steps_per_rollout = args.num_mini_batches * args.num_ppo_epochs
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * rollouts * steps_per_rollout)
    n_rollouts = -(-steps // steps_per_rollout)
    episodes, asked = n_rollouts * args.batch_size, args.total_episodes
    rounded = f" (`total_episodes` {asked:,}, rounded up to whole rollouts)" if asked not in (None, episodes) else ""
    policy = size_of(actor_critic.parameters_of("policy"))
    trained = size_of(p for p in actor_critic.parameters_of("policy") if p.requires_grad)
    critic = size_of(actor_critic.parameters_of("critic"))
    reference = "none" if not args.use_ref_model else "frozen copy" if trainer.ref_model is not None else "adapter off"
    return (
        f"PPO: {rows:,} prompts × {trainer.num_generations} responses; a rollout is "
        f"{args.batch_size:,} episodes = {args.num_mini_batches} minibatches of {args.mini_batch_size:,} "
        f"({args.per_device_train_batch_size} per device × {args.gradient_accumulation_steps} accumulated × "
        f"{args.world_size} processes), passed over {args.num_ppo_epochs} times = {steps_per_rollout} optimizer "
        f"steps.\n     {n_rollouts:,} rollouts, {steps:,} optimizer steps, {episodes:,} episodes{rounded}; "
        f"responses of up to {trainer.max_completion_length} tokens, ended by "
        f"{trainer._tokenizer.convert_ids_to_tokens(trainer.eos_token_ids)}.\n"
        f"     policy {policy:,} parameters ({trained:,} trained), critic {critic:,} ({trainer._critic_origin}), "
        f"reference: {reference}; rewards: {', '.join(trainer.reward_func_names)}."
    )
