"""Divide rows into splits that keep groups whole and have the same mix of chosen values; balance rows by values."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xxhash
from datasets import Dataset

from .texts import say
from .trained import pair_hashes, prompt_hashes

_GOLDEN = (5**0.5 - 1) / 2  # its multiples, modulo 1, spread most evenly


def split_groups(
    groups: Sequence[int] | np.ndarray, shares: Mapping[str, float], strata: Sequence[Any] | None = None, seed: int = 0
) -> np.ndarray:
    """
    Divide rows into splits, and keep all rows of a group in the same split.

    Groups are sorted by stratum and by size, with equals in random order, and are dealt to the splits by steps of the
    golden ratio. Any stretch of successive groups then has the wanted shares to within about two groups, so that rare
    strata are divided fairly, too. A group goes to the largest split if it has more rows than the smallest split
    should get of the group's stratum.

    Args:
        groups: (N,) number of each row's group, such as `Duplicates.near`; rows with the same number stay together.
        shares: name of each split → its share of the rows, above 0; the sum is 1.
        strata: (N,) value of each row, such as its topic; all splits should have the same mix of these. Each row of a
            group counts with the value of the group's first row.
        seed: seed of the random order.

    Returns:
        (N,) the name of each row's split.
    """
    groups = np.asarray(groups)
    if not len(groups):
        return np.zeros(0, object)
    _, firsts, group, sizes = np.unique(groups, return_index=True, return_inverse=True, return_counts=True)
    stratum = _numbers(strata)[firsts] if strata is not None else np.zeros(len(firsts), np.int64)
    names = sorted(shares, key=lambda name: -shares[name])
    total = np.bincount(stratum, sizes)[stratum]
    is_large = sizes > np.maximum(min(shares.values()) * total, 1)
    large = np.bincount(stratum, sizes * is_large)[stratum]
    draw = np.random.default_rng(seed)
    shuffled = draw.permutation(len(sizes))
    order = shuffled[np.lexsort((sizes[shuffled], stratum[shuffled]))]
    turn = np.empty(len(sizes))
    turn[order] = (draw.random() + np.arange(len(sizes)) * _GOLDEN) % 1
    # Share of the dealt rows that the largest split gets, as it has the large groups already
    first = np.clip((shares[names[0]] * total - large) / np.maximum(total - large, 1), 0, 1)
    later = np.cumsum([shares[name] for name in names[1:]])
    rest = np.searchsorted(later[:-1] / later[-1:], (turn - first) / np.maximum(1 - first, 1e-9), side="right")
    places = np.where(is_large | (turn < first) | (len(names) == 1), 0, rest + 1)
    return np.array(names, dtype=object)[places[group]]


def hold_out_prompts(dataset: Dataset, eval_size: int, seed: int) -> tuple[Dataset, Dataset | None]:
    """
    Hold out rows at random, so that all rows of a prompt are held out or none.

    Prompts are taken in random order while no more than `eval_size` rows are held out, but at least one is. If all
    prompts are different, the result is that of `Dataset.train_test_split`.

    Args:
        dataset: rows as a trainer reads them, see [`prompt_groups`]. If all have the same prompt, rows are divided.
        eval_size: number of rows to hold out; 0 for none.
        seed: seed of the random order.

    Returns:
        The rows to train on, and the rows to evaluate on (None if `eval_size` is 0).
    """
    if eval_size == 0:
        return dataset, None
    groups = prompt_groups(dataset)
    if is_one := groups.max() == 0:
        groups = np.arange(len(dataset))
    sizes, is_held = np.bincount(groups), np.zeros(groups.max() + 1, bool)
    order, count = np.random.default_rng(seed).permutation(len(sizes)), 0
    for prompt in order:
        if count + sizes[prompt] <= eval_size:
            is_held[prompt], count = True, count + sizes[prompt]
    if not count:
        is_held[order[np.argmin(sizes[order])]] = True
    rows = np.argsort(np.argsort(order)[groups], kind="stable")
    held = is_held[groups[rows]]
    if is_one:
        say(f"All {len(rows):,} rows have one prompt, so what is held out shares it with what is trained on.")
    elif len(sizes) < len(rows):
        say(f"`eval_size` {eval_size:,}: {held.sum():,} rows are held out, all those of {is_held.sum():,} prompts.")
    return dataset.select(rows[~held]), dataset.select(rows[held])


def prompt_groups(dataset: Dataset) -> np.ndarray:
    """
    Number the prompts of rows by first occurrence, as [`prompt_hashes`] tells them apart: (N,) integers.

    Pairs whose prompt is not known count as having one prompt if they share an answer, and other rows if they have the
    same text or token ids, or else if they are equal.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    keys = np.stack([prompt_hashes(dataset)] * 2, axis=1)
    if len(unknown := np.flatnonzero(keys[:, 0] == 0)):
        rows, names = dataset.select(unknown), set(dataset.column_names)
        if names >= {"chosen", "rejected"}:
            keys[unknown] = pair_hashes(rows)
        else:
            names = next(({name} for name in ("prompt_ids", "input_ids", "text") if name in names), names)
            texts = (repr(row).encode(errors="surrogatepass") for row in rows.select_columns(sorted(names)))
            keys[unknown] = np.array([xxhash.xxh3_64_intdigest(text) for text in texts], np.uint64)[:, None]
    nodes, edges = np.unique(keys, return_inverse=True)
    one, other = edges.reshape(-1, 2).T
    graph = coo_array((np.ones(len(one), np.int8), (one, other)), shape=(len(nodes), len(nodes)))
    return _numbers(connected_components(graph, directed=False)[1][one].tolist())


def balanced_rows(values: Sequence[Any], most: int | None = None, seed: int = 0) -> np.ndarray:
    """
    Choose rows at random so that each value has at most `most` rows.

    Args:
        values: (N,) value of each row, such as its topic.
        most: largest number of rows with one value; None: the number of rows with the rarest value.
        seed: seed of the random choice.

    Returns:
        (N,) whether a row is kept.
    """
    numbers = _numbers(values)
    keep = np.zeros(len(numbers), bool)
    if not len(numbers):
        return keep
    most = int(np.bincount(numbers).min()) if most is None else most
    shuffled = np.random.default_rng(seed).permutation(len(numbers))
    ordered = shuffled[np.argsort(numbers[shuffled], kind="stable")]
    begins = np.r_[0, np.flatnonzero(np.diff(numbers[ordered])) + 1]
    place = np.arange(len(ordered)) - np.repeat(begins, np.diff(np.r_[begins, len(ordered)]))
    keep[ordered[place < most]] = True
    return keep


def _numbers(values: Sequence[Any]) -> np.ndarray:
    """Number the different values by first occurrence; 1 and "1" count as different."""
    seen: dict[Any, int] = {}
    return np.array([seen.setdefault(_hashable(value), len(seen)) for value in values], np.int64)


def _hashable(value: Any) -> Any:
    return value if isinstance(value, (str, int, type(None))) else repr(value)
