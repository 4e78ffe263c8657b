"""Write the summary that is printed when a PPO run begins."""

import math
from typing import Any

from ..runs.schedule import block, count, portions, reference_of, saves, sizes


def steps_of(trainer: Any) -> int:
    """Compute the number of optimizer steps of a run."""
    args = trainer.args
    if args.max_steps > 0:
        return args.max_steps
    rollouts = len(trainer.train_dataset) * trainer.num_generations // args.batch_size
    return math.ceil(args.num_train_epochs * rollouts * args.steps_per_rollout)


def schedule(trainer: Any) -> str:
    """Return lines that say which models PPO will train, for how many steps, and the sizes of rollouts and batches."""
    args, actor_critic, rows = trainer.args, trainer._actor_critic, len(trainer.train_dataset)
    steps, steps_per_rollout = steps_of(trainer), args.steps_per_rollout
    n_rollouts = -(-steps // steps_per_rollout)
    episodes, asked = n_rollouts * args.batch_size, args.total_episodes
    rounded = f" (`total_episodes` {asked:,}, rounded up to whole rollouts)" if asked not in (None, episodes) else ""
    ends = ", ".join(trainer._tokenizer.convert_ids_to_tokens(trainer.eos_token_ids))
    answers = f" × {trainer.num_generations}" if trainer.num_generations > 1 else ""
    passes = "once" if args.num_ppo_epochs == 1 else f"{args.num_ppo_epochs} times"
    minibatches = f"{args.num_mini_batches} × {args.mini_batch_size:,}"
    return block(
        "PPO",
        {
            "policy": sizes(actor_critic.named_parameters_of("policy"), actor_critic.policy),
            "critic": f"{sizes(actor_critic.named_parameters_of('critic'), actor_critic.policy)}: "
            f"{trainer._critic_origin}",
            "reference": reference_of(trainer, actor_critic.policy) if args.use_ref_model else "none",
            "rewards": ", ".join(trainer.reward_func_names),
            "data": f"{count(rows, 'prompt')}{answers}; answers end by {ends}, or at "
            f"{count(trainer.max_completion_length, 'token')}",
            "step": f"{count(args.mini_batch_size, 'episode')} = {portions(args)}",
            "rollout": f"{count(args.batch_size, 'episode')} = {minibatches}, passed over {passes}: "
            f"{count(steps_per_rollout, 'optimizer step')}",
            "total": f"{count(n_rollouts, 'rollout')} = {count(steps, 'optimizer step')}, "
            f"{count(episodes, 'episode')}{rounded}",
            "saves": saves(args),
        },
    )
