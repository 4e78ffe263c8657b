"""Divide rows into splits that keep groups together and have the same mix of strata."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xxhash
from datasets import Dataset
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from .texts import say
from .trained import pair_hashes, prompt_hashes


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
        seed: seed of the random order.

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
        seed: seed of the random order.

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
    rows = np.argsort(np.argsort(order)[groups], kind="stable")
    held = is_held[groups[rows]]
    if is_one:
        say(f"All {len(rows):,} rows have the same prompt, so held-out and training rows share it.")
    elif len(sizes) < len(rows):
        of = f"{is_held.sum():,} of the {len(sizes):,} prompts"
        say(f"`eval_size` {eval_size:,}: held out {held.sum():,} of {len(rows):,} rows, all rows of {of}.")
    return dataset.select(rows[~held]), dataset.select(rows[held])


def prompt_groups(dataset: Dataset) -> np.ndarray:
    """
    Return a number for each row's prompt, (N,) int: 0, 1, … by first occurrence, the same for the same prompt.

    Prompts are the same if their [`prompt_hashes`] are. If prompts are unknown, two pairs count as having the same one
    if they share an answer. Other rows with unknown prompts are compared by the first of the columns `prompt_ids`,
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
            texts = (repr(row).encode(errors="surrogatepass") for row in rows.select_columns(sorted(names)))
            keys[unknown] = np.array([xxhash.xxh3_64_intdigest(text) for text in texts], np.uint64)[:, None]
    _, numbers = np.unique(keys, return_inverse=True)
    one, other = numbers.reshape(keys.shape).T
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
