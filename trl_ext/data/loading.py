"""Load one split of a dataset from a file, a folder or the Hugging Face hub; write rows as a file of JSON lines."""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError

from ..runs.files import whole_file, without_nan
from ..runs.package_files import find
from .splits import hold_out_prompts

_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def load_dataset_split(
    name: str | os.PathLike[str],
    split: str = "train",
    *,
    config: str | None = None,
    columns: Sequence[str] = ("prompt",),
) -> Dataset:
    """Load one split of a dataset and check that it has the columns that a trainer needs.

    A single file is one split, `train`. In a folder, the files' names give the splits, as on the hub: `train.jsonl`,
    `test.jsonl`. All columns are kept, since reward functions get those that the trainer does not use.

    Args:
        name: a `.jsonl`, `.json`, `.parquet` or `.csv` file; a folder of such files; a folder written by
            `save_to_disk`; a folder that ships with the package, such as `recipes/tinystories/prompts`; or else a
            dataset on the Hugging Face hub.
        split: name of the split, or a part of it, such as `train[:50%]` or `train[1000:]`. In a folder written by
            `save_to_disk`, only a name.
        config: configuration of a hub dataset (`name` in `datasets.load_dataset`).
        columns: required columns, such as `("prompt", "chosen", "rejected")`.

    Raises:
        ValueError: one of `columns` is missing, the split does not exist, or the file is empty or broken.
    """
    path = find(name)
    if path.suffix in _BUILDERS:
        try:
            dataset = load_dataset(_BUILDERS[path.suffix], data_files=str(path), split=split)
        except (StopIteration, DatasetGenerationError) as error:
            raise ValueError(f"{path} cannot be read: {error.__cause__ or 'it has no rows'}") from error
    elif (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        saved = load_from_disk(str(path))
        splits = saved if isinstance(saved, DatasetDict) else {"train": saved}
        if split not in splits:
            raise ValueError(f"{path} has no split {split!r}, only {', '.join(splits)}")
        dataset = splits[split]
    else:
        source = str(path.resolve()) if path.exists() else str(name)
        dataset = load_dataset(source, name=config, split=split)
    dataset.select_columns([*columns])  # which raises a `ValueError` if one is missing
    return dataset


def held_out_rows(
    train: Dataset, load_held_out: Callable[[], Dataset], eval_size: int | None, seed: int
) -> tuple[Dataset, Dataset | None]:
    """Return the rows to train on, and the rows to evaluate on (None without evaluation).

    Args:
        train: the training split.
        load_held_out: loads the held-out split; called only if `eval_size` is None.
        eval_size: number of rows to take from the training split for evaluation, by [`hold_out_prompts`]. 0: no
            evaluation. None: evaluate on the held-out split.
        seed: seed of the random choice of these rows.

    Raises:
        ValueError: `load_held_out` raised a `ValueError`, as for a split that does not exist.
    """
    if eval_size is not None:
        return hold_out_prompts(train, eval_size, seed)
    try:
        return train, load_held_out()
    except ValueError as error:
        raise ValueError(
            f"no rows to evaluate on: {str(error).rstrip('.')}. Set `eval_size` to hold out that many rows of the "
            "training data, or to 0 for no evaluation"
        ) from error


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """
    Write rows as JSON lines to the file `path`, atomically: the file is complete, or the old one is unchanged.

    NaN and infinities become null; a value of a type that JSON lacks is written as `str(value)`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Half of a surrogate pair has no UTF-8; written as \udXXX, JSON reads it back as it was
    with whole_file(path) as temporary, temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(json.dumps(without_nan(row), ensure_ascii=False, default=str) + "\n" for row in rows)
