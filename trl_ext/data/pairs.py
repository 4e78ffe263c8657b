"""Filter preference pairs that teach nothing, check the pairs' columns, and add these columns to batches."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from .messages import has_content, is_text, one_form, print_on_first, rows_of

# Columns that a batch may have besides TRL's own. They are taken out again, since TRL would pass them to the model
PAIR_COLUMNS = ("margin", "confidence", "weight", "source")
SCORES = ("score_chosen", "score_rejected")  # dataset columns; `margin` is their difference
_LOWEST_AND_HIGHEST = {"confidence": (0.5, 1.0), "weight": (0.0, math.inf)}  # any finite number in other columns


def usable_pairs(dataset: Dataset, name: str, drop: bool = False) -> Dataset:
    """Return the pairs that have a prompt and two different completions; cut the prompt where they repeat it.

    Args:
        dataset: rows with `chosen` and `rejected`, text or messages, and with `prompt` unless `chosen` and `rejected`
            contain it.
        name: name of the dataset for error messages.
        drop: whether to leave out all unusable pairs, and print how many there are.

    Raises:
        ValueError: some pairs are unusable and `drop` is False, all pairs are unusable, or some rows are text and
            others messages.
    """
    dataset = one_form(dataset, name)
    columns = ["chosen", "rejected", *(["prompt"] if "prompt" in dataset.column_names else [])]
    wrong = [
        row
        for row, pair in enumerate(rows_of(dataset, columns))
        if not (has_content(pair["chosen"]) and has_content(pair["rejected"]) and is_text(pair.get("prompt", "")))
        or pair["chosen"] == pair["rejected"]
    ]
    if not wrong:
        return dataset
    message = f"{name}: {len(wrong):,} of {len(dataset):,} pairs lack a prompt or two different completions"
    if not drop or len(wrong) == len(dataset):
        otherwise = "" if len(wrong) == len(dataset) else ", or set `drop_unusable_pairs`"
        raise ValueError(f"{message} (first row {wrong[0]}): correct them{otherwise}.")
    print_on_first(f"{message}: left out.")
    return dataset.select(np.setdiff1d(np.arange(len(dataset)), wrong))


def check_columns(dataset: Any, name: str, columns: Sequence[str]) -> None:
    """
    Raise a `ValueError` if one of `columns` has a number that is not finite, a `confidence` outside [0.5, 1] or a
    `weight` below 0. Only a `Dataset` is checked, not a stream. `name` is the dataset's, for the message.
    """
    for column in columns if isinstance(dataset, Dataset) else ():
        low, high = _LOWEST_AND_HIGHEST.get(column, (-math.inf, math.inf))
        values = np.array(dataset[column][:], float)  # None becomes NaN
        wrong = np.flatnonzero(~(np.isfinite(values) & (low <= values) & (values <= high)))
        if len(wrong):
            within = "" if low == -math.inf else f" >= {low:g}" if high == math.inf else f" in [{low:g}, {high:g}]"
            raise ValueError(
                f"The {name} dataset, row {wrong[0]}: `{column}` must be a finite number{within}, got "
                f"{dataset[int(wrong[0])][column]}."
            )


@dataclass
class PairCollator:
    """
    Collate pairs with TRL's `collator`, and add `columns` to the batch: `source` as (B,) integers, others as (B,)
    floats.

    The columns `score_chosen` and `score_rejected` are added as one, `margin`, their difference.

    Args:
        sources: maps the name of a source to its index in the list of sources; an unknown source becomes −1.
    """

    collator: Any
    columns: tuple[str, ...]
    sources: dict[str, int] = field(default_factory=dict)

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self.collator(examples)
        for name in self.columns:
            if name == "source":
                batch[name] = torch.tensor([self.sources.get(example[name], -1) for example in examples])
            elif name not in SCORES:
                batch[name] = torch.tensor([float(example[name]) for example in examples])
        if "score_chosen" in self.columns:
            batch["margin"] = torch.tensor([float(e["score_chosen"] - e["score_rejected"]) for e in examples])
        return batch


def take_columns(inputs: dict[str, Any], names: Sequence[str] = PAIR_COLUMNS) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the batch `inputs` into two dicts: the columns `names`, and all other columns, which are passed to TRL."""
    columns = {name: inputs[name] for name in names if name in inputs}
    return columns, {name: value for name, value in inputs.items() if name not in columns}
