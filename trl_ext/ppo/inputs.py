"""Check the arguments and the prompts of PPOTrainer."""

import inspect
import math
from collections.abc import Callable
from typing import Any

from datasets import Dataset
from torch import nn
from transformers import ProcessorMixin

from ..data import check_one_kind, check_texts
from ..models.generation import check_chat_template
from ..models.weights import base_model_of, vocabulary_of
from ..upstream.names import get_callable_name, get_config_model_id, is_vllm_available
from .config import PPOConfig
from .rewards import AdapterReward
from .vllm import check_server


def listed(
    model: Any, reward_funcs: Any, reward_processing_classes: Any, processing_class: Any, may_own_reward: bool = False
) -> tuple[list, list]:
    """
    Return the list of reward functions, and the list of their tokenizers.

    A reward model that was built in memory names no tokenizer; it reads the policy's tokens.
    """
    if model is None:
        raise ValueError("`model` is required: a path or a causal language model.")
    if reward_funcs in (None, []) and not may_own_reward:  # else TRL says so if no environment has one
        raise ValueError("`reward_funcs` is required: a reward model (path or object), a function, or a list of them.")
    rewards = list(reward_funcs or []) if isinstance(reward_funcs, (list, tuple, type(None))) else [reward_funcs]
    classes = reward_processing_classes
    classes = list(classes) if isinstance(classes, (list, tuple)) else [classes] * len(rewards)
    for i, reward in enumerate(rewards if len(classes) == len(rewards) else []):  # else GRPO says what is wrong
        if not isinstance(reward, nn.Module):
            continue
        if not hasattr(reward, "config"):
            raise TypeError(
                f"reward {i} ({type(reward).__name__}) has no `config`: pass a transformers sequence classifier, or a "
                "function that calls your module."
            )
        if classes[i] is None and not get_config_model_id(reward.config):
            if processing_class is None:
                raise ValueError(
                    f"reward model {i} was built in memory, so its tokenizer is not known: pass "
                    "`reward_processing_classes` or `processing_class`."
                )
            classes[i] = processing_class
    return rewards, classes


_GIVEN = {  # what every reward function is given, beside the dataset's columns
    *("prompts", "completions", "completion_ids", "prompt_ids", "finished", "trainer_state", "log_extra", "log_metric")
}


def check_arguments(reward: Any, columns: list[str], name: str, adds_columns: bool = False) -> None:
    """
    Raise if a reward function cannot take all columns, or needs an argument that no column provides.

    With `adds_columns` a missing column is allowed: the trainer's `rollout_func` may add it.
    """
    try:
        arguments = None if isinstance(reward, (str, nn.Module)) else inspect.signature(reward).parameters
    except (TypeError, ValueError):  # of a function in C
        arguments = None
    if arguments is None:
        return
    takes_all = any(argument.kind is inspect.Parameter.VAR_KEYWORD for argument in arguments.values())
    refused = sorted({*_GIVEN, *columns} - arguments.keys() - {"prompt"})
    if refused and not takes_all:
        raise TypeError(
            f"Reward function '{get_callable_name(reward)}' does not take {', '.join(refused)}, which the trainer "
            "passes: let its last argument be `**kwargs`."
        )
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [a.name for a in arguments.values() if a.kind in by_name and a.default is inspect.Parameter.empty]
    missing = [argument for argument in needed if argument not in {*_GIVEN, *columns}]
    if missing and not adds_columns:
        raise ValueError(
            f"Reward function '{get_callable_name(reward)}' needs {', '.join(missing)}, but the {name} dataset has "
            f"the columns {', '.join(columns)}: rename or add one, or give the argument a default."
        )


def check_inputs(
    model,
    args,
    train_dataset,
    eval_dataset,
    processing_class,
    value_model,
    ref_model,
    reward_funcs,
    has_environments=False,
    adds_columns=False,
) -> None:
    """Raise if arguments of the trainer are wrong or contradict each other, before any model is loaded."""
    if not isinstance(args, PPOConfig):
        raise TypeError(f"`args` must be a `PPOConfig`, got {type(args).__name__}.")
    if args.use_vllm and not is_vllm_available():
        raise ImportError(
            "`use_vllm=True` needs vLLM, which is not installed: `pip install vllm`, or set `use_vllm=False`."
        )
    check_server(args)
    if ref_model is not None and not args.use_ref_model:
        raise ValueError(
            "`ref_model` was passed, but `use_ref_model=False` loads no reference. Leave one of them out."
        )
    named = [("model", model), ("ref_model", ref_model), ("value_model", value_model)]
    for name, value in named:
        if not isinstance(value, (str, nn.Module, type(None))):
            raise TypeError(f"`{name}` must be a path or a model, got {value!r}.")
    for i, reward in enumerate(reward_funcs):
        if not (isinstance(reward, (str, nn.Module)) or callable(reward)):
            raise TypeError(f"reward {i} must be a path, a model or a function, got {reward!r}.")
    for i, (name, a) in enumerate(named):
        for other, b in named[i + 1 :]:
            if a is b and isinstance(a, nn.Module):
                raise ValueError(
                    f"`{name}` and `{other}` are the same object, so training one would change the other. Pass a copy."
                )
    for i, reward in enumerate(reward_funcs):
        if reward is value_model and isinstance(reward, nn.Module):
            raise ValueError(
                f"`value_model` and reward function {i} are the same object, so training the critic would change the "
                "reward. Leave `value_model` out: the critic then starts as a copy of a reward model."
            )
    if processing_class is None and not isinstance(model, str) and not get_config_model_id(model.config):
        raise ValueError("`model` was built in memory, so its tokenizer is not known: pass `processing_class`.")
    if isinstance(processing_class, ProcessorMixin):
        raise ValueError("Vision-language models are not supported: pass a tokenizer as `processing_class`.")
    if train_dataset is None and not has_environments:  # else TRL says when there must be one
        raise ValueError("`train_dataset` is required.")
    named_datasets = eval_dataset if isinstance(eval_dataset, dict) else {"eval": eval_dataset}
    for name, dataset in [("train", train_dataset), *named_datasets.items()]:
        if dataset is None:
            continue
        if not isinstance(dataset, Dataset):
            raise TypeError(
                f"The {name} dataset must be a `datasets.Dataset`, got {type(dataset).__name__}: shuffling and "
                "resuming need its length. Turn a stream into one with `Dataset.from_list(list(stream.take(n)))`."
            )
        if len(dataset) == 0:
            raise ValueError(f"The {name} dataset is empty.")
        if not has_environments and not {"prompt", "input_ids"} & set(dataset.column_names):
            raise ValueError(
                f"The {name} dataset needs a column `prompt` (text or messages) or `input_ids` (tokens); it has "
                f"{dataset.column_names}."
            )
        if "prompt" in dataset.column_names:
            check_texts(dataset, ("prompt",), f"The {name} dataset")
            check_one_kind(dataset, ("prompt",), f"The {name} dataset")
        given = {"prompt_ids": "the prompts' tokens", "finished": "whether an answer ended"}
        if taken := [column for column in given if column in dataset.column_names]:
            raise ValueError(
                f"The {name} dataset has a column `{taken[0]}`, but reward functions get {given[taken[0]]} under this "
                "name. Rename the column."
            )
        if {"image", "images"} & set(dataset.column_names):
            raise ValueError(f"The {name} dataset has images; vision-language models are not supported.")
        for reward in reward_funcs:
            check_arguments(reward, dataset.column_names + ["environments"] * has_environments, name, adds_columns)
    if eval_dataset is not None:
        check_evaluation_batch(args)
    if isinstance(eval_dataset, dict) and args.metric_for_best_model == "eval_objective/scores":
        raise ValueError(
            "`metric_for_best_model='eval_objective/scores'` is not logged with several eval datasets: choose one of "
            f"{[f'eval_{name}_objective/scores' for name in eval_dataset]}."
        )
    if train_dataset is None:
        return
    needed = args.generation_batch_size // args.num_generations
    if len(train_dataset) < needed:
        raise ValueError(
            f"The train dataset has {len(train_dataset)} prompts, but a rollout needs {needed} "
            f"(`per_device_train_batch_size` {args.per_device_train_batch_size} × `gradient_accumulation_steps` "
            f"{args.gradient_accumulation_steps} × `num_mini_batches` {args.num_mini_batches} × {args.world_size} "
            f"processes / `num_generations` {args.num_generations}). Lower one of the first three, or add prompts."
        )
    column = {"group": args.reward_group_column, "reference": args.reward_reference_column}.get(
        args.reward_normalization
    )
    if column is not None and column not in train_dataset.column_names:
        raise ValueError(
            f"`reward_normalization={args.reward_normalization!r}` reads the column {column!r}, but the train dataset "
            f"has {train_dataset.column_names}. Add that column, or name another."
        )


def check_token_ids(dataset: Dataset, name: str, vocabulary: int) -> None:
    """Raise if a row's `input_ids` are not token ids of the policy, or its `attention_mask` has another length."""
    columns = [column for column in ("input_ids", "attention_mask") if column in dataset.column_names]
    for row, example in enumerate(dataset.with_format(None).select_columns(columns)):
        ids, mask = example["input_ids"], example.get("attention_mask")
        where = f"The {name} dataset, row {row}: "
        if isinstance(ids, list) and mask is not None and len(mask) != len(ids):
            raise ValueError(
                f"{where}`attention_mask` has {len(mask)} entries, but `input_ids` has {len(ids)}. Make them equally "
                "long."
            )
        real = [i for i, is_real in zip(ids, mask, strict=True) if is_real] if isinstance(ids, list) and mask else ids
        if not isinstance(real, list) or not all(isinstance(i, int) and 0 <= i < vocabulary for i in real):
            raise ValueError(
                f"{where}`input_ids` must be a list of token ids below {vocabulary}, the policy's vocabulary, got "
                f"{repr(ids)[:80]}."
            )


def check_evaluation_batch(args: PPOConfig) -> None:
    """Raise if an evaluation batch, over all processes, would split the answers to one prompt."""
    generations = args.num_generations_eval or args.num_generations
    size = args.per_device_eval_batch_size * args.world_size
    if size % generations:
        raise ValueError(
            f"An evaluation batch has {size} responses (`per_device_eval_batch_size` "
            f"{args.per_device_eval_batch_size} × {args.world_size} processes), which is not a multiple of "
            f"{generations} (`num_generations_eval`, or `num_generations` if unset). Change one of these settings."
        )


class TokenizedText(str):
    """Hold a prompt as text, together with the token ids that the policy reads for it."""

    token_ids: list[int]


class TokenizedMessages(list):
    """Hold a prompt as messages, together with the token ids that the policy reads for it."""

    token_ids: list[int]


def tokenized(prompts: list, token_ids: list[list[int]] | None) -> list:
    """Attach token ids to prompts, so that TRL does not tokenise them; if `token_ids` is None, return `prompts`."""
    if token_ids is None:
        return prompts
    carriers = [TokenizedText(prompt) if isinstance(prompt, str) else TokenizedMessages(prompt) for prompt in prompts]
    for carrier, ids in zip(carriers, token_ids, strict=True):
        carrier.token_ids = ids
    return carriers


def with_prompts(rows: list[dict[str, Any]], tokenizer: Any) -> tuple[list[dict[str, Any]], list[list[int]] | None]:
    """
    Make sure that rows have a `prompt`: if they have `input_ids` alone, decode it from these.

    Returns:
        The rows; and the token ids of each row's prompt without padding, or None if the rows have no `input_ids`.
    """
    if "input_ids" not in rows[0]:
        return rows, None
    token_ids = []
    for row in rows:
        mask = row.get("attention_mask")
        mask = [1] * len(row["input_ids"]) if mask is None else mask
        token_ids.append([int(i) for i, real in zip(row["input_ids"], mask, strict=True) if real])
    if "prompt" not in rows[0]:
        texts = tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        rows = [{**row, "prompt": text} for row, text in zip(rows, texts, strict=True)]
    return rows, token_ids


def check_templates(tokenizer: Any, rewards: Any, datasets: list[tuple[str, Dataset | None]]) -> None:
    """Raise if prompts are messages, but the policy's tokenizer, or a reward model's, has no chat template."""
    for name, dataset in datasets:
        if dataset is None or "prompt" not in dataset.column_names:
            continue
        prompts, what = dataset["prompt"], f"the prompts of the {name} dataset"
        if "input_ids" not in dataset.column_names:
            check_chat_template(tokenizer, prompts, "the policy's tokenizer", what)
        for reward, reward_tokenizer, reward_name in zip(
            rewards.functions, rewards.tokenizers, rewards.names, strict=True
        ):
            if isinstance(reward, (AdapterReward, nn.Module)):
                check_chat_template(reward_tokenizer, prompts, f"the tokenizer of reward model '{reward_name}'", what)


def check_prompt_lengths(
    measure: Callable[[list[dict[str, Any]]], list[int]],
    policy: Any,
    max_completion_length: int,
    datasets: list[tuple[str, Dataset | None]],
) -> None:
    """Raise if a prompt is empty, has a wrong token id, or leaves no room for an answer in the policy's context.

    `measure` takes rows and returns the number of prompt tokens of each.
    """
    context: Any = getattr(base_model_of(policy).config.get_text_config(), "max_position_embeddings", None)
    for name, dataset in datasets:
        if dataset is None:
            continue
        if "input_ids" in dataset.column_names:
            check_token_ids(dataset, name, vocabulary_of(policy))
        columns = [c for c in ("prompt", "input_ids", "attention_mask") if c in dataset.column_names]
        batches = dataset.select_columns(columns).iter(1000)
        lengths = [
            length
            for batch in batches
            for length in measure([dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)])
        ]
        if 0 in lengths:
            raise ValueError(
                f"{lengths.count(0)} of {len(lengths)} prompts in the {name} dataset are empty (the first is row "
                f"{lengths.index(0)}): the policy needs a token to start from. Filter them out."
            )
        too_long = sum(length + max_completion_length > (context or math.inf) for length in lengths)
        if too_long:
            raise ValueError(
                f"{too_long} of {len(lengths)} prompts in the {name} dataset leave no room for "
                f"`max_completion_length={max_completion_length}` in the policy's context of {context} "
                f"tokens (longest prompt: {max(lengths)}): {_what_fits(lengths, max_completion_length, context)}."
            )


def _what_fits(lengths: list[int], max_completion_length: int, context: int) -> str:
    """Say which `max_completion_length` fits the prompts, or which prompts are too long for the present setting."""
    shorter = "set `max_completion_length` to {} or less"
    filtered = "filter out prompts of more than {} tokens"
    room, left = context - max(lengths), context - max_completion_length
    some_fit = min(lengths) <= left
    if room > 0:
        return shorter.format(room) + (f", or {filtered.format(left)}" if some_fit else "")
    if some_fit:
        return filtered.format(left)
    room = context - min(lengths)
    if room > 0:
        return f"{shorter.format(room)}, and filter out prompts that leave no room for that"
    return "no prompt leaves room for a token, so shorten them, or train a policy with a longer context"
