"""Read tables of labels, long or wide, as arrays of items, annotators and choices."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from .columns import Columns

FIRST, SECOND, TIE = range(3)
_MISSING = -1
_ROWS = 50_000  # read at a time
_EMPTY = pd.util.hash_array(np.array([""], dtype=object))[0]
_RANKED = 100  # most answers to one prompt that an annotator may rank: the number of pairs grows with their square
_TEXT_TYPES = (pa.types.is_string, pa.types.is_large_string, pa.types.is_nested, pa.types.is_null)
_MIX = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplying loses nothing


@dataclass(frozen=True)
class Labels:
    """
    Hold L labels of I items by A annotators as arrays; an annotator has at most one label of an item.

    An item is a prompt with two answers.

    Args:
        item: (L,) int, the labelled item, as a place in `rows`.
        annotator: (L,) int, who gave the label, as a place in `annotators`.
        choice: (L,) int, `FIRST`, `SECOND` or `TIE`, in the order of the answers in the item's first row.
        swapped: (L,) bool, whether the annotator was shown the answers in the reverse order of the item's first row.
        annotators: (A,) names.
        rows: (I,) int, the item's first row in the table.
        answers: (I, 2) int, where the item's two answers are in the table: row · number of response columns + column.
        responses: (I, 2) int, a number for each answer; the same answer to the same prompt has the same number.
        prompt: (I,) int, a number for the prompt; the same prompt has the same number.
        usable: (I,) bool, whether the two answers differ and neither is empty.
        time, seconds, confidence: (L,) float, when the label was given, how long it took, and how sure the annotator
            was. NaN where that is unknown; None if the table has no such column.
        repeats: (A,) int, how often the annotator labelled an item again.
        contradictions: (A,) int, for how many items the annotator's repeated labels differ; all labels that the
            annotator gave such an item are left out.
        missing: number of cells that have no label, or no annotator.
    """

    item: np.ndarray
    annotator: np.ndarray
    choice: np.ndarray
    swapped: np.ndarray
    annotators: list[str]
    rows: np.ndarray
    answers: np.ndarray
    responses: np.ndarray
    prompt: np.ndarray
    usable: np.ndarray
    time: np.ndarray | None = None
    seconds: np.ndarray | None = None
    confidence: np.ndarray | None = None
    repeats: np.ndarray = field(default_factory=lambda: np.zeros(0, int))
    contradictions: np.ndarray = field(default_factory=lambda: np.zeros(0, int))
    missing: int = 0

    def __len__(self) -> int:
        return len(self.item)

    def where(self, kept: np.ndarray) -> "Labels":
        """Return the labels for which `kept`, (L,) bool, is True; items and annotators keep their places."""
        names = ("item", "annotator", "choice", "swapped", "time", "seconds", "confidence")
        return replace(self, **{name: getattr(self, name)[kept] for name in names if getattr(self, name) is not None})

    def counts(self) -> np.ndarray:
        """Return how often each item was labelled `FIRST`, `SECOND`, `TIE`: (I, 3) int."""
        size = 3 * len(self.rows)
        return np.bincount(self.item * 3 + self.choice, minlength=size).reshape(-1, 3)


def read_labels(dataset: Dataset, columns: Columns | None = None) -> Labels:
    """
    Read a table of labels part by part.

    Only hashes of the texts are kept, so memory grows by some 250 bytes a label.

    Args:
        dataset: the table.
        columns: which column holds what; by default, the columns that `Columns()` names.

    Raises:
        ValueError: a column is missing, a choice is not in `columns.values`, a score is not a number, a time is
            neither a number nor a date, rows of one item have different texts, or there is no label. If a row is
            wrong, the message names it.
    """
    columns = columns or Columns()
    if missing := [name for name in columns.names if name not in dataset.column_names]:
        raise ValueError(
            f"the table lacks the column(s) {', '.join(map(repr, missing))}; it has "
            f"{', '.join(map(repr, dataset.column_names))}: name other columns"
        )
    names: dict[str, int] = {name: place for place, name in enumerate(columns.annotators)}
    parts = [_read_rows(*batch, columns, names) for batch in _batches(dataset, columns)]
    if not parts:
        raise ValueError("the table has no rows")
    table = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    del parts
    unscored = 0
    if len(columns.responses) == 1:
        table, unscored = _compared(table, list(names))
    item, firsts, first = _items(table, columns)
    place, answers = table.pop("place"), table["answers"][firsts]
    of_answers = [table["prompt"][firsts] * _MIX + table[side][firsts] for side in ("first", "second")]
    labels = Labels(
        item=item[place],
        annotator=table["annotator"],
        choice=table["choice"],
        swapped=(table["first"] != first)[place],
        annotators=list(names),
        rows=answers[:, 0] // len(columns.responses),
        answers=answers,
        responses=pd.factorize(np.concatenate(of_answers))[0].reshape(2, -1).T,
        prompt=pd.factorize(table["prompt"][firsts])[0],
        usable=table["usable"][firsts],
        time=table.get("time"),
        seconds=table.get("seconds"),
        confidence=table.get("confidence"),
    )
    known = (labels.choice != _MISSING) & (labels.annotator != _MISSING)
    labels = replace(labels.where(known), missing=unscored + int((~known).sum()))
    if not len(labels):
        raise ValueError(f"the table has {len(dataset)} rows, but none has a label")
    return _once(_in_order_of_item(labels))


def _compared(read: dict[str, np.ndarray], names: list[str]) -> tuple[dict[str, np.ndarray], int]:
    """
    Pair the answers that one annotator scored for one prompt, in the table's order.

    Return the table of these pairs, and how many answers have no score or no annotator.
    """
    place, who, score = read["place"], read["annotator"], read["score"]
    known = np.flatnonzero(np.isfinite(score) & (who != _MISSING))
    group = pd.factorize(read.get("key", read["prompt"])[place[known]])[0] * len(names) + who[known]
    order = np.argsort(group, kind="stable")
    known, group = known[order], group[order]
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    sizes = np.diff(starts, append=len(group))
    if sizes.size and sizes.max() > _RANKED:
        first = known[starts[sizes.argmax()]]
        raise ValueError(
            f"{names[who[first]]!r} scored {sizes.max():,} answers to the prompt in row {place[first]}, but at most "
            f"{_RANKED} are compared: set `item_column` to a column that tells prompts apart"
        )
    pairs = [np.zeros((2, 0), int)]
    for distance in range(1, int(sizes.max(initial=1))):
        pairs.append(np.flatnonzero(group[distance:] == group[:-distance]) + [[0], [distance]])
    one, other = known[np.concatenate(pairs, axis=1)]
    differs = read["first"][place[one]] != read["first"][place[other]]
    order = np.lexsort((place[other], place[one]))
    one, other = one[order][differs[order]], other[order][differs[order]]
    rows = place[one], place[other]
    first, second = (read["first"][row] for row in rows)
    table: dict[str, np.ndarray] = {name: read[name][rows[0]] for name in ("prompt", "key") if name in read}
    table |= {"first": first, "second": second, "texts": _texts(table["prompt"], first, second)}
    table |= {"usable": (first != _EMPTY) & (second != _EMPTY), "answers": np.stack(rows, 1)}
    table |= {"place": np.arange(len(one)), "annotator": who[one], "choice": _higher(score[one], score[other])}
    table |= {n: (read[n][one] + read[n][other]) / 2 for n in ("time", "seconds", "confidence") if n in read}
    return table, len(place) - len(known)


def _texts(prompt: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Hash a prompt and its two answers; exchanging the answers does not change the hash."""
    return (prompt * _MIX + np.minimum(first, second)) * _MIX + np.maximum(first, second)


def _higher(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.select([a > b, a < b, a == b], [FIRST, SECOND, TIE], _MISSING).astype(np.int8)


def _in_order_of_item(labels: Labels) -> Labels:
    turned = labels.swapped & (labels.choice != TIE)
    return replace(labels, choice=np.where(turned, 1 - labels.choice, labels.choice).astype(np.int8))


def _once(labels: Labels) -> Labels:
    """If an annotator labelled an item several times, keep one label if all are equal, and none if they differ."""
    size = len(labels.annotators)
    key = labels.item * size + labels.annotator
    order = np.argsort(key, kind="stable")
    starts = np.flatnonzero(np.diff(key[order], prepend=-1))
    choice = labels.choice[order]
    differs = np.maximum.reduceat(choice, starts) != np.minimum.reduceat(choice, starts)
    who = labels.annotator[order][starts]
    repeats = np.bincount(who, np.diff(starts, append=len(order)) - 1, size).astype(int)
    contradictions = np.bincount(who[differs], minlength=size)
    is_kept = np.zeros(len(order), bool)
    is_kept[order[starts[~differs]]] = True
    return replace(labels.where(is_kept), repeats=repeats, contradictions=contradictions)


def _items(table: dict[str, np.ndarray], columns: Columns) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """
    Number the items. Rows with the same name are one item; without a column of names, rows with the same prompt and
    answers are.

    Return three arrays: each row's item, each item's first row, and for each row the hash of the answer that comes
    first in the first row of its item.
    """
    key = table["texts"]
    if columns.item:  # of a ranking it names the prompt, not each of its pairs
        key = table["key"] if len(columns.responses) == 2 else table["key"] * _MIX + key
    item, _ = pd.factorize(key)  # in the order of their first rows
    firsts = np.flatnonzero(_is_new(item))
    if columns.item:
        differ = np.flatnonzero(table["texts"] != table["texts"][firsts][item])
        if len(differ):
            row = int(differ[0])
            raise ValueError(
                f"rows {firsts[item[row]]} and {row} have the same {columns.item!r}, but different texts: give each "
                "pair of answers a name of its own, or leave the column out"
            )
    return item, firsts, table["first"][firsts][item]


def _is_new(codes: np.ndarray) -> np.ndarray:
    """Return for each code whether it appears for the first time; codes are numbered by their first appearance."""
    highest = np.maximum.accumulate(codes)
    return np.diff(highest, prepend=-1) > 0


def _batches(dataset: Dataset, columns: Columns) -> Iterator[tuple[int, pa.Table]]:
    rows = dataset.select_columns(list(dict.fromkeys(columns.names))).with_format("arrow")
    for place, table in enumerate(rows.iter(_ROWS)):
        _check_utf8(table, place * _ROWS)
        yield place * _ROWS, table


def _check_utf8(table: pa.Table, start: int) -> None:
    """Refuse text that is not UTF-8, which readers of JSON lines let through."""
    try:
        table.validate(full=True)
    except pa.ArrowInvalid as error:
        for name in table.column_names:
            for row, value in enumerate(table[name]):
                try:
                    value.as_py()
                except UnicodeDecodeError:
                    raise ValueError(
                        f"the column {name!r} is not UTF-8 in row {start + row}: convert the table, for example with "
                        "`iconv -f latin1 -t utf-8`"
                    ) from error
        raise ValueError(f"rows {start} to {start + len(table)} cannot be read: {error}") from error


def _read_rows(start: int, table: pa.Table, columns: Columns, names: dict[str, int]) -> dict[str, np.ndarray]:
    """
    Read some rows as arrays by name.

    Arrays on texts have one entry for each pair of answers in a row. Arrays on labels have one entry for each label,
    and the array `place` says which pair each label is of. In a table with one answer a row, a row counts as a pair.
    """
    size, answers = len(table), len(columns.responses)
    prompt = np.zeros(size, np.uint64)
    for name in columns.prompt:
        prompt = prompt * _MIX + _hashes(table[name], "" if len(columns.prompt) > 1 else name)
    hashes = np.stack([_hashes(table[name], name) for name in columns.responses], 1)
    one, other = np.triu_indices(answers, 1) if answers > 1 else (np.zeros(1, int),) * 2
    pairs = len(one)
    cells = np.arange(start * answers, (start + size) * answers).reshape(size, answers)
    first, second = hashes[:, one].ravel(), hashes[:, other].ravel()
    read = {"prompt": np.repeat(prompt, pairs), "first": first}
    if answers > 1:
        usable = (first != second) & (first != _EMPTY) & (second != _EMPTY)
        read |= {"second": second, "usable": usable, "texts": _texts(read["prompt"], first, second)}
        read["answers"] = np.stack([cells[:, one].ravel(), cells[:, other].ravel()], 1)
    if columns.item:
        read["key"] = np.repeat(_hash_each(_names(table[columns.item])), pairs)
    places = np.arange(start * pairs, (start + size) * pairs)
    sign = -1 if columns.lowest_wins else 1
    if columns.annotators:
        read["place"] = np.tile(places, len(columns.annotators))
        read["annotator"] = np.repeat(np.arange(len(columns.annotators), dtype=np.int32), size)
        of_one = [
            sign * _numbers(table[name], name, start) if answers == 1 else _choices(table[name], name, start, columns)
            for name in columns.annotators
        ]
        read["score" if answers == 1 else "choice"] = np.concatenate(of_one)
        return read
    assert columns.annotator
    read |= {"place": places, "annotator": np.repeat(_annotators(table[columns.annotator], names), pairs)}
    if columns.scores:
        scores = sign * np.stack([_numbers(table[name], name, start) for name in columns.scores], 1)
        scored = scores[:, one].ravel(), scores[:, other].ravel()
        read["score" if answers == 1 else "choice"] = scored[0] if answers == 1 else _higher(*scored)
    elif columns.choice:
        read["choice"] = _choices(table[columns.choice], columns.choice, start, columns)
    if columns.time:
        read["time"] = np.repeat(_times(table[columns.time], columns.time, start), pairs)
    for name, column in (("seconds", columns.seconds), ("confidence", columns.confidence)):
        if column:
            read[name] = np.repeat(_numbers(table[column], column, start), pairs)
    return read


def _hashes(column: pa.ChunkedArray, name: str = "") -> np.ndarray:
    """Hash each value of a column; if a `name` is given, refuse a column of anything but text or messages."""
    kind = column.type
    if name and not any(is_kind(kind) for is_kind in _TEXT_TYPES):
        raise ValueError(f"the column {name!r} must hold text or messages, but it holds {kind}: write it as text")
    return _hash_each(_strings(column))


def _hash_each(column: pa.ChunkedArray) -> np.ndarray:
    return pd.util.hash_array(column.fill_null("").to_numpy().astype(object), categorize=False)


def _strings(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return values as text: messages as JSON, and 1.0 as 1, since integers with gaps are read from CSV as floats."""
    kind = column.type
    if pa.types.is_nested(kind):
        return pa.chunked_array([[json.dumps(value, sort_keys=True) for value in column.to_pylist()]])
    if pa.types.is_floating(kind):
        values = column.to_numpy()
        whole = np.isfinite(values) & (values == np.round(values))
        texts = [str(int(x)) if w else None if np.isnan(x) else str(x) for x, w in zip(values, whole, strict=True)]
        return pa.chunked_array([pa.array(texts, pa.string())])
    return column.cast(pa.string())


def _names(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return names as text, without spaces around them, which people type without noticing."""
    return pc.utf8_trim_whitespace(_strings(column))


def _choices(column: pa.ChunkedArray, name: str, start: int, columns: Columns) -> np.ndarray:
    values = _names(column).combine_chunks().dictionary_encode()
    known = {value: min(place, TIE) for place, value in enumerate(columns.values)} | {"": _MISSING}
    codes = values.indices.fill_null(_MISSING).to_numpy()
    texts = values.dictionary.to_pylist()
    for code, text in enumerate(texts):
        if text not in known:
            row = start + int(np.flatnonzero(codes == code)[0])
            raise ValueError(
                f"the column {name!r} holds {text[:40]!r} in row {row}, not one of {', '.join(columns.values)}: name "
                "the values that mean the first answer, the second and a tie"
            )
    return np.array([*(known[text] for text in texts), _MISSING], np.int8)[codes]


def _annotators(column: pa.ChunkedArray, names: dict[str, int]) -> np.ndarray:
    values = _names(column).combine_chunks().dictionary_encode()
    places = [names.setdefault(text, len(names)) if text else _MISSING for text in values.dictionary.to_pylist()]
    return np.array([*places, _MISSING], np.int32)[values.indices.fill_null(_MISSING).to_numpy()]


def _numbers(column: pa.ChunkedArray, name: str, start: int) -> np.ndarray:
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        return column.cast(pa.float64()).fill_null(np.nan).to_numpy()
    given = pd.Series(column.to_pylist(), dtype=object)
    given = given.where(given.astype(str).str.strip() != "")
    numbers = pd.to_numeric(given, errors="coerce")  # as text, too: one word makes a column of CSV text
    for row in np.flatnonzero(numbers.isna() & given.notna())[:1]:
        raise ValueError(f"the column {name!r} must hold numbers, but row {start + row} has {given[row]!r:.40}")
    return numbers.to_numpy(float)


def _times(column: pa.ChunkedArray, name: str, start: int) -> np.ndarray:
    """Return times as numbers: dates as seconds since 1970, numbers as they are."""
    if pa.types.is_string(column.type) or pa.types.is_temporal(column.type) or pa.types.is_large_string(column.type):
        given = pd.Series(column.to_pandas())
        dates = pd.to_datetime(given, utc=True, errors="coerce", format="mixed")
        if wrong := [int(row) for row in np.flatnonzero(dates.isna() & given.notna())[:1]]:
            raise ValueError(
                f"the column {name!r} must hold times, but row {start + wrong[0]} has {given.iloc[wrong[0]]!r}"
            )
        return (dates - pd.Timestamp(0, tz="UTC")).dt.total_seconds().to_numpy()
    return _numbers(column, name, start)
