"""Check the arguments and data sets of the trainer, and name the rows that are wrong."""

import textwrap
from collections.abc import Iterator
from typing import Any

from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from torch import nn
from transformers import AutoProcessor

from ..data import has_content, is_text, one_form
from ..data.pair_columns import SCORES, column_problem
from ..models.generation import check_chat_template
from ..upstream.names import get_config_model_id
from .config import DPOConfig

_SHOWN = 5


def check_arguments(model: Any, args: Any, processing_class: Any) -> None:
    """Raise a `TypeError` or `ValueError` for arguments that would make TRL fail later."""
    if not isinstance(args, DPOConfig):
        raise TypeError(f"`args` must be a `trl_ext.DPOConfig`, got {type(args).__module__}.{type(args).__name__}.")
    if not isinstance(model, (str, nn.Module)):
        raise TypeError(f"`model` must be a path or a causal language model, got {model!r}.")
    if processing_class is not None and getattr(processing_class, "tokenizer", processing_class).eos_token is None:
        raise ValueError("The tokenizer has no EOS token, and an answer must end with one. Set `tokenizer.eos_token`.")
    if processing_class is None and not isinstance(model, str) and not get_config_model_id(model.config):
        raise ValueError("`model` was built in memory, so its tokenizer is not known: pass `processing_class`.")


def check_template(model: Any, args: DPOConfig, processing_class: Any, train_dataset: Any, eval_dataset: Any) -> None:
    """Raise a `ValueError` if a data set has messages, but the tokenizer has no chat template."""
    evals = eval_dataset if isinstance(eval_dataset, dict) else {"eval": eval_dataset}
    for name, dataset in [("train", train_dataset), *evals.items()]:
        first: dict[str, Any] = next(iter(dataset or ()), {})  # TRL, too, decides by the first row
        texts = first.get("chosen")
        if isinstance(texts, list):
            if processing_class is None:  # load it as TRL does
                path = model if isinstance(model, str) else get_config_model_id(model.config)
                revision = (args.model_init_kwargs or {}).get("revision")
                processing_class = AutoProcessor.from_pretrained(
                    path, revision=revision, trust_remote_code=args.trust_remote_code
                )
            check_chat_template(processing_class, [texts], "the tokenizer", f"the answers of the {name} dataset")


def wanted_columns(args: DPOConfig, train_dataset: Any) -> tuple[str, ...]:
    """
    Return the names of the dataset columns that the settings read.

    With `use_margin` the two score columns are among them if the train dataset has one of these, else `margin`.

    Raises:
        ValueError: with `use_margin`, the train dataset has both `margin` and a score column.
    """
    wanted: list[str] = []
    if args.use_margin:
        found = _columns_of(train_dataset)
        scores = [column for column in SCORES if column in found]
        if "margin" in found and scores:
            raise ValueError(
                f"The train dataset has the columns `margin` and {', '.join(f'`{column}`' for column in scores)}, and "
                "both say how much the chosen answer must win by. Remove one with `Dataset.remove_columns`."
            )
        wanted += SCORES if scores else ["margin"]
    wanted += ["confidence"] * args.use_confidence + ["weight"] * args.use_weight
    return tuple(wanted + ["source"] * (args.margin_normalization == "source"))


def _columns_of(dataset: Any) -> list[str]:
    return getattr(dataset, "column_names", None) or list(next(iter(dataset or ()), ()))


def check_dataset(dataset: Any, name: str, args: DPOConfig, columns: tuple[str, ...]) -> Any:
    """
    Return the dataset if its rows can be trained on; else raise an error, which names the first bad rows.

    For a stream, return a stream that checks each row when the row is read.
    """
    if not isinstance(dataset, (Dataset, IterableDataset)):
        hint = ": pass one of its splits" if isinstance(dataset, (DatasetDict, IterableDatasetDict)) else ""
        raise TypeError(f"The {name} dataset must be a `datasets.Dataset`, got `{type(dataset).__name__}`{hint}.")
    if isinstance(dataset, Dataset) and len(dataset) == 0:
        raise ValueError(f"The {name} dataset is empty.")
    found = _columns_of(dataset)
    missing = [column for column in ("chosen", "rejected", *columns) if column not in found]
    if missing:
        raise ValueError(
            f"The {name} dataset lacks the column(s) {', '.join(f'`{column}`' for column in missing)}; it has "
            f"{found}. Rename one with `rename_column`, or unset the option that reads it."
        )
    if isinstance(dataset, IterableDataset):
        if args.margin_normalization != "none" or (args.beta_controller == "drift" and args.drift_horizon is None):
            raise ValueError(
                "`margin_normalization='source'` and `beta_controller='drift'` without `drift_horizon` need the whole "
                f"dataset, but the {name} dataset is a stream: pass a `datasets.Dataset`, or change these settings."
            )
        stream = one_form(dataset, f"The {name} dataset")
        return stream.map(_checked, with_indices=True, fn_kwargs={"name": name, "columns": columns})
    dataset = one_form(dataset, f"The {name} dataset")
    problems: list[str] = []
    prompt = ["prompt"] * ("prompt" in found)
    for row, example in enumerate(dataset.select_columns([*prompt, "chosen", "rejected", *columns])):
        problems += [f"row {row}: {problem}" for problem in _problems(example, columns)]
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ValueError(
            f"The {name} dataset has unusable pairs: {'; '.join(problems[:_SHOWN])}{more}. Correct them, or leave "
            "them out (`trl_ext.data.usable_pairs` leaves out those without two different answers)."
        )
    return dataset


def check_not_dropped(trainer: Any, given: Any, given_eval: Any = None) -> None:
    """Print how many pairs TRL dropped because `max_length` cuts their answers off; raise if none is left."""
    parts = {"train": (given, trainer.train_dataset)}
    if isinstance(given_eval, dict):
        parts |= {f"eval {name!r}": (part, trainer.eval_dataset[name]) for name, part in given_eval.items()}
    else:
        parts["eval"] = given_eval, trainer.eval_dataset
    for name, (before, after) in parts.items():
        if not isinstance(before, Dataset) or len(after) == len(before):
            continue
        dropped, limit = len(before) - len(after), f"`max_length={trainer.args.max_length}`"
        if dropped == len(before):
            raise ValueError(
                f"{limit} leaves no answer token in any pair of the {name} dataset, because it counts prompt and "
                "answer together. Raise `max_length`, or shorten the prompts."
            )
        where = "" if name == "train" else f" of the {name} dataset"
        trainer.accelerator.print(
            f"{dropped} of {len(before)} pairs{where} are left out: {limit} leaves no answer token in them."
        )


def check_evaluation(dataset: Any, args: DPOConfig, columns: tuple[str, ...]) -> Any:
    """Check an evaluation dataset, or each dataset of a dictionary, by [`check_dataset`], and return the result."""
    if not isinstance(dataset, dict):
        return check_dataset(dataset, "eval", args, columns)
    return {name: check_dataset(part, f"eval {name!r}", args, columns) for name, part in dataset.items()}


def _checked(example: dict[str, Any], row: int, name: str, columns: tuple[str, ...]) -> dict[str, Any]:
    for problem in _problems(example, columns):
        raise ValueError(f"The {name} dataset, row {row}: {problem}.")
    return example


def _problems(example: dict[str, Any], columns: tuple[str, ...]) -> Iterator[str]:
    empty = [column for column in ("chosen", "rejected") if not has_content(example[column])]
    for column in empty:
        value = example[column]
        wrong_type = value is not None and not isinstance(value, (str, list))
        yield f"`{column}` " + (f"must be text or messages, got {value!r}" if wrong_type else "is empty")
    if not is_text(example.get("prompt", "")):
        yield f"`prompt` must be text or messages, got {example['prompt']!r}"
    if not empty and example["chosen"] == example["rejected"]:
        yield "`chosen` and `rejected` are identical"
    for column in columns:
        value = example[column]
        if column == "source":
            if not isinstance(value, str):
                yield f"`source` must be a string, got {value!r}"
            continue
        if problem := column_problem(column, value):
            yield problem


def name_row(trainer: Any, inputs: dict[str, Any], row: int) -> str:
    """
    Return words that name the dataset row with the tokens of row number `row` of a batch.

    The first half of the batch's rows are chosen answers, the second half rejected ones. If no dataset row has these
    tokens, the words are the row's text.
    """
    ids = inputs["input_ids"][row][inputs["attention_mask"][row].bool()].tolist()
    text = textwrap.shorten(trainer._tokenizer.decode(ids), 160)
    completion = "chosen_ids" if row < len(inputs["input_ids"]) // 2 else "rejected_ids"
    evals = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {"eval": trainer.eval_dataset}
    for name, dataset in [("train", trainer.train_dataset), *evals.items()]:
        if isinstance(dataset, Dataset) and completion in dataset.column_names:
            for index, example in enumerate(dataset.select_columns(["prompt_ids", completion])):
                if (example["prompt_ids"] + example[completion])[: len(ids)] == ids:
                    return f"row {index} of the prepared {name} dataset ({text!r})"
    return f"the row {text!r}"
