"""Check the arguments and the prompts of PPOTrainer."""

import inspect
from collections.abc import Callable
from itertools import combinations
from typing import Any

from datasets import Dataset
from torch import nn

from ..models.weights import context_of
from ..upstream.names import get_callable_name, get_config_model_id
from ..upstream.statements import refuse
from .config import PPOConfig

Datasets = list[tuple[str, Dataset]]


def rewards_and_tokenizers(reward_funcs: Any, tokenizers: Any, policy_tokenizer: Any) -> tuple[list, list]:
    """
    Return a list of the rewards and a list of their tokenizers, None where there is none.

    A reward model that has neither a tokenizer nor a path or hub name gets the policy's tokenizer.

    Args:
        reward_funcs: one reward, a list of them, or None for none.
        tokenizers: one tokenizer for all rewards, a list with one or None for each, or None.
    """
    rewards = list(reward_funcs or []) if isinstance(reward_funcs, (list, tuple, type(None))) else [reward_funcs]
    tokenizers = list(tokenizers) if isinstance(tokenizers, (list, tuple)) else [tokenizers] * len(rewards)
    for i, reward in enumerate(rewards):
        if isinstance(reward, nn.Module) and tokenizers[i] is None and not get_config_model_id(reward.config):
            tokenizers[i] = policy_tokenizer
    return rewards, tokenizers


def check(args: PPOConfig, models: dict[str, Any], datasets: Datasets, agent: list[str], optimizer: Any) -> None:
    """
    Raise a `ValueError` if the trainer's arguments contradict each other, so that it would train wrongly or fail late.

    Args:
        models: the trainer's arguments `model`, `value_model`, `ref_model` and each reward, by name.
        datasets: names and datasets, "train" and those to evaluate on, "eval" or "eval_…".
        agent: the names among `tools`, `environment_factory` and `rollout_func` that were given to the trainer.
        optimizer: the optimizer passed to the trainer in `optimizers`, if any.
    """
    given = [(name, model) for name, model in models.items() if isinstance(model, nn.Module)]
    same = [(a, b) for (a, x), (b, y) in combinations(given, 2) if x is y]
    needed = args.generation_batch_size // args.num_generations
    names = {name: {*dataset.column_names} for name, dataset in datasets}
    sizes = {name: len(dataset) for name, dataset in datasets}  # a stream has none, and an evaluation needs it
    prompts = sizes.get("train", needed)
    best = args.metric_for_best_model == "eval_objective/scores"
    refuse(
        (bool(same), f"{same} are the same object, but each must be a separate one. Pass a copy."),
        (
            models["ref_model"] is not None and not args.use_ref_model,
            "`ref_model` was passed, but `use_ref_model=False` loads no reference. Leave one of them out.",
        ),
        (
            args.critic_warmup_rollouts > 0 and args.baseline == "mean",
            "`critic_warmup_rollouts` trains only the critic, but `baseline='mean'` uses none. Leave it out.",
        ),
        (
            models["value_model"] is not None and args.baseline == "mean",
            "`value_model` was passed, but `baseline='mean'` uses no critic. Leave one of them out.",
        ),
        (
            optimizer is not None and args.critic_learning_rate is not None,
            "`critic_learning_rate` cannot be applied to an optimizer that was passed in `optimizers`: give the "
            "critic its own parameter group there, and leave `critic_learning_rate` out.",
        ),
        (
            prompts < needed,
            f"The train dataset has {prompts} prompts, but a rollout needs {needed} (`per_device_train_batch_size` × "
            "`gradient_accumulation_steps` × `num_mini_batches` × processes / `num_generations`). Add prompts, or "
            "lower `num_mini_batches` or the batch size.",
        ),
        (
            best and names.keys() - {"train", "eval"},
            "`eval_objective/scores` is not logged with a dict of eval datasets: choose one of "
            f"{[f'{name}_objective/scores' for name in names if name != 'train']} as `metric_for_best_model`.",
        ),
        (
            args.reward_normalization == "reference"
            and ("completion" not in names.get("train", ()) or "environment_factory" in agent),
            "`reward_normalization='reference'` scores the demonstrations in the column `completion` of the train "
            "dataset, without an environment. Add the column, or choose another normalisation.",
        ),
        (bool(agent) and args.rollouts_ahead > 0, f"`rollouts_ahead` does not work with {agent}. Leave one out."),
    )
    if len(names) > ("train" in names):
        check_evaluation_batch(args)
    for name, columns in names.items():
        if taken := columns & {*_GIVEN, "image", "images"} - {"completion_ids"}:  # which TRL leaves out
            raise ValueError(
                f"The {name} dataset has the columns {sorted(taken)}. Rename or remove them: reward functions get "
                "other values by such names, and images are not supported."
            )


# What every reward function is given, beside the dataset's columns
_GIVEN = {"completion_ids", "completions", "environments", "finished", "prompt_ids", "prompts"}
_GIVEN |= {"log_extra", "log_metric", "trainer_state"}


def check_arguments(rewards: list, datasets: Datasets) -> None:
    """
    Raise a `ValueError` if a function in `rewards` needs an argument that is neither given to every reward function,
    nor a column of each dataset in `datasets`, which are names and datasets. Models and paths are skipped.
    """
    for name, dataset in datasets:
        for reward in rewards:
            if isinstance(reward, (str, nn.Module)):
                continue
            arguments = inspect.signature(reward).parameters.values()
            needed = {
                a.name
                for a in arguments
                if a.default is a.empty and a.kind in (a.POSITIONAL_OR_KEYWORD, a.KEYWORD_ONLY)
            }
            if missing := needed - _GIVEN - {*dataset.column_names}:
                raise ValueError(
                    f"Reward function '{get_callable_name(reward)}' needs {missing}, but the {name} dataset has "
                    f"{dataset.column_names}: rename or add a column, or give the argument a default."
                )


def check_evaluation_batch(args: PPOConfig) -> None:
    """
    Raise a `ValueError` if the number of completions of a prompt does not divide an evaluation batch, over all
    processes.
    """
    generations = args.num_generations_eval or args.num_generations
    size = args.per_device_eval_batch_size * args.world_size
    if size % generations:
        raise ValueError(
            f"An evaluation batch has {size} completions (`per_device_eval_batch_size` × processes), which is not a "
            f"multiple of {generations} (`num_generations_eval`, or `num_generations` if unset). Change one of them."
        )


def check_prompt_lengths(
    tokenize: Callable[[list], tuple], models: dict[str, Any], max_completion_length: int, datasets: Datasets
) -> None:
    """
    Raise a `ValueError` if a prompt is empty, or leaves no room for the longest completion in the smallest context.

    Args:
        tokenize: takes prompts, and returns a tuple that begins with a list of the token ids of each.
        models: the models that read these tokens, by their names in the message.
        datasets: names and datasets of prompts.
    """
    context, whose = min((context_of(model), name) for name, model in models.items())
    for name, dataset in datasets:
        lengths: list[int] = []
        for batch in dataset.select_columns("prompt").iter(1000):
            is_empty = [prompt in (None, []) for prompt in batch["prompt"]]
            full = [prompt for prompt, empty in zip(batch["prompt"], is_empty, strict=True) if not empty]
            measured = map(len, tokenize(full)[0] if full else ())
            lengths += [0 if empty else next(measured) for empty in is_empty]
        if not lengths:
            raise ValueError(f"The {name} dataset has no rows, or none is left.")
        if 0 in lengths:
            raise ValueError(
                f"{lengths.count(0)} of {len(lengths)} prompts of the {name} dataset are empty, but the policy needs "
                "a token to start from. Remove these rows."
            )
        if (longest := max(lengths)) + max_completion_length > context:
            prompt = str(dataset[lengths.index(longest)]["prompt"])
            raise ValueError(
                f"A prompt of the {name} dataset has {longest} tokens, which leaves no room for "
                f"`max_completion_length={max_completion_length}` in the {whose}'s context of {context} tokens. Lower "
                f"`max_completion_length`, or leave out long prompts (`max_prompt_length` of `trl-ext ppo` does). It "
                f"begins with {prompt[:60]!r}."
            )
