"""The schedule that is printed when PPO begins."""

import math
from typing import Any

from ..schedule import block, portions, saves, sizes


def schedule(trainer: Any) -> str:
    """Say what will be trained, how long, and in which portions."""
    args, actor_critic, rows = trainer.args, trainer._actor_critic, len(trainer.train_dataset)
    rollouts = rows * trainer.num_generations // args.batch_size
    steps_per_rollout = args.num_mini_batches * args.num_ppo_epochs
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * rollouts * steps_per_rollout)
    n_rollouts = -(-steps // steps_per_rollout)
    episodes, asked = n_rollouts * args.batch_size, args.total_episodes
    rounded = f" (`total_episodes` {asked:,}, rounded up to whole rollouts)" if asked not in (None, episodes) else ""
    reference = "none" if not args.use_ref_model else "frozen copy" if trainer.ref_model is not None else "adapter off"
    ends = ", ".join(trainer._tokenizer.convert_ids_to_tokens(trainer.eos_token_ids))
    answers = f" × {trainer.num_generations}" if trainer.num_generations > 1 else ""
    passes = "once" if args.num_ppo_epochs == 1 else f"{args.num_ppo_epochs} times"
    return block(
        "PPO",
        {
            "policy": sizes(actor_critic.parameters_of("policy")),
            "critic": f"{sizes(actor_critic.parameters_of('critic'))}: {trainer._critic_origin}",
            "reference": reference,
            "rewards": ", ".join(trainer.reward_func_names),
            "data": f"{rows:,} prompts{answers}; answers end by {ends}, or at {trainer.max_completion_length} tokens",
            "step": f"{args.mini_batch_size:,} episodes = {portions(args)}",
            "rollout": f"{args.batch_size:,} episodes = {args.num_mini_batches} × {args.mini_batch_size:,}, passed "
            f"over {passes}: {steps_per_rollout} optimizer steps",
            "total": f"{n_rollouts:,} rollouts = {steps:,} optimizer steps, {episodes:,} episodes{rounded}",
            "saves": saves(args),
        },
    )
