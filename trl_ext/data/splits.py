"""Load one split of a dataset, divide rows into splits that keep groups together, and write rows as JSON lines."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from ..evaluation.words import text_hash
from ..runs.files import finite, write_text
from ..runs.package_files import find
from .messages import print_on_first
from .trained import pair_hashes, prompt_hashes

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

    NaN and infinities become null; arrays become lists, and other values of types that JSON lacks become text.
    """
    lines = (json.dumps(finite(row, nan_as_null=True), ensure_ascii=False) + "\n" for row in rows)
    write_text(path, "".join(lines))


def split_groups(
    groups: Sequence[int] | np.ndarray, shares: Mapping[str, float], strata: Sequence[Any] | None = None, seed: int = 0
) -> np.ndarray:
    """
    Divide rows into splits, and keep all rows of a group in the same split.

    Each group goes to the split that is furthest below its share of the rows assigned so far. Groups are assigned
    stratum by stratum, so that rare strata, too, are divided in about the wanted shares. Within a stratum, large
    groups come first, and groups of the same size in random order.

    Args:
        groups: (N,) number of each row's group, such as `Duplicates.near`; rows with the same number stay together.
        shares: maps the name of each split to its share of the rows, above 0; the shares sum to 1.
        strata: (N,) value of each row, such as its topic; all splits should have the same mix of values. Each row of a
            group counts with the value of the group's first row.

    Returns:
        (N,) the name of each row's split.
    """
    _, firsts, group, sizes = np.unique(groups, return_index=True, return_inverse=True, return_counts=True)
    stratum = np.zeros(len(firsts), int) if strata is None else _numbers(strata)[firsts]
    shuffled = np.random.default_rng(seed).permutation(len(sizes))
    order = shuffled[np.lexsort((-sizes[shuffled], stratum[shuffled]))]
    lacks = dict.fromkeys(shares, 0.0)
    names = np.empty(len(sizes), object)
    for number in order:
        for name, share in shares.items():
            lacks[name] += share * sizes[number]
        names[number] = max(lacks, key=lambda name: lacks[name])
        lacks[names[number]] -= sizes[number]
    return names[group]


def hold_out_prompts(dataset: Dataset, eval_size: int, seed: int) -> tuple[Dataset, Dataset | None]:
    """
    Hold out rows at random for evaluation; of each prompt, either all rows are held out or none.

    Prompts are taken in random order, each if its rows still fit into `eval_size`. If none fits, the one with the
    fewest rows is taken. If all prompts are different, the result is that of `Dataset.train_test_split`.

    Args:
        dataset: rows as a trainer reads them, see [`prompt_groups`]. If all rows have the same prompt, single rows are
            held out.
        eval_size: most rows to hold out; 0 for none. There are more only if each prompt has more rows than this.

    Returns:
        The rows to train on, and the rows to evaluate on (None if `eval_size` is 0).

    Raises:
        ValueError: no row would be left to train on.
    """
    if eval_size == 0:
        return dataset, None
    if eval_size >= len(dataset):
        raise ValueError(f"`eval_size` {eval_size:,} holds out all {len(dataset):,} rows: none is left to train on")
    groups = prompt_groups(dataset)
    if is_one := groups.max() == 0:
        groups = np.arange(len(dataset))
    sizes = np.bincount(groups)
    is_held = np.zeros(groups.max() + 1, bool)
    order = np.random.default_rng(seed).permutation(len(sizes))
    count = 0
    for prompt in order:
        if count + sizes[prompt] <= eval_size:
            is_held[prompt] = True
            count = count + sizes[prompt]
    if not count:
        is_held[order[np.argmin(sizes[order])]] = True
    # In the prompts' random order, as `train_test_split` leaves rows
    rows = np.argsort(np.argsort(order)[groups], kind="stable")
    held = is_held[groups[rows]]
    if is_one:
        print_on_first(f"All {len(rows):,} rows have the same prompt, so held-out and training rows share it.")
    elif len(sizes) < len(rows):
        of = f"{is_held.sum():,} of the {len(sizes):,} prompts"
        print_on_first(f"`eval_size` {eval_size:,}: held out {held.sum():,} of {len(rows):,} rows, all rows of {of}.")
    return dataset.select(rows[~held]), dataset.select(rows[held])


def prompt_groups(dataset: Dataset) -> np.ndarray:
    """
    Return a number for each row's prompt, (N,) int: 0, 1, … by first occurrence, the same for the same prompt.

    Prompts are the same if their [`prompt_hashes`] are. If prompts are unknown, two pairs count as having the same one
    if they share a completion. Other rows with unknown prompts are compared by the first of the columns `prompt_ids`,
    `input_ids` and `text` that there is, or else by all columns.
    """
    keys = np.stack([prompt_hashes(dataset)] * 2, axis=1)
    if len(unknown := np.flatnonzero(keys[:, 0] == 0)):
        rows = dataset.select(unknown)
        names = set(dataset.column_names)
        if names >= {"chosen", "rejected"}:
            keys[unknown] = pair_hashes(rows)
        else:
            names = next(({name} for name in ("prompt_ids", "input_ids", "text") if name in names), names)
            hashes = [text_hash(repr(row)) for row in rows.select_columns(sorted(names))]
            keys[unknown] = np.array(hashes, np.uint64)[:, None]
    _, numbers = np.unique(keys, return_inverse=True)
    one, other = numbers.reshape(keys.shape).T
    # Rows that share a key belong together, and so do rows that a third row links
    size = numbers.max(initial=-1) + 1
    graph = coo_array((np.ones(len(one)), (one, other)), (size, size))
    _, components = connected_components(graph)
    return _numbers(components[one].tolist())


def _numbers(values: Sequence[Any]) -> np.ndarray:
    """Number values 0, 1, … by first occurrence; equal values have the same number, while 1 and "1" differ."""
    seen: dict[Any, int] = {}
    return np.array([seen.setdefault(_hashable(value), len(seen)) for value in values], np.int64)


def _hashable(value: Any) -> Any:
    return value if isinstance(value, (str, int, type(None))) else repr(value)
