"""Check the number columns of preference pairs, such as `margin`, and put them into batches."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import Dataset

# Columns that a batch may have besides TRL's own. They are taken out again, since TRL would pass them to the model
PAIR_COLUMNS = ("margin", "confidence", "weight", "source")
SCORES = ("score_chosen", "score_rejected")  # dataset columns; `margin` is their difference
_RULES = {  # column: (rule in words, test of a float)
    "margin": ("a finite number", math.isfinite),
    "score_chosen": ("a finite number", math.isfinite),
    "score_rejected": ("a finite number", math.isfinite),
    "confidence": ("in [0.5, 1]: below 0.5, the other answer is the chosen one", lambda x: 0.5 <= x <= 1),
    "weight": ("a finite number >= 0", lambda x: 0 <= x < math.inf),
}


@dataclass
class PairCollator:
    """
    Make a batch with `collator`, and add columns of the pairs: (B,) floats, and (B,) integers for `source`.

    Args:
        collator: TRL's collator.
        columns: dataset columns to read.
        sources: name of a source → its place in the list of sources; an unknown source becomes −1.
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
    """Split a batch in two: the columns called `names`, and all other columns, which TRL gets."""
    columns = {name: inputs[name] for name in names if name in inputs}
    return columns, {name: value for name, value in inputs.items() if name not in columns}


def column_problem(column: str, value: Any) -> str:
    """Return what is wrong with a number in a column of pairs; "" if the number is valid."""
    rule, is_valid = _RULES[column]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not is_valid(value):
        return f"`{column}` must be {rule}, got {value!r}"
    return ""


def check_columns(dataset: Dataset, name: str, columns: Sequence[str]) -> None:
    """
    Check that a dataset has all `columns`, with a valid number in each row.

    Raises:
        ValueError: a column is missing, or has an invalid number. The message names the column, or the first such row.
    """
    for column in columns:
        if column not in dataset.column_names:
            raise ValueError(
                f"The {name} dataset lacks the column `{column}`, which `use_{column}` reads; it has "
                f"{dataset.column_names}. Add the column, or unset `use_{column}`."
            )
        for row, value in enumerate(dataset[column]):
            if problem := column_problem(column, value):
                raise ValueError(f"The {name} dataset, row {row}: {problem}.")
