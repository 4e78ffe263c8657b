"""Choose which rows of examined prompts are left out, and where the others go."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from ...data import balanced_rows, split_groups
from .examine import PromptReport

Remove = Literal["near", "exact", "none"]
REASONS = ("", "empty", "shared with a held-out set", "duplicate", "balance")
"""Why a row is left out; "" for rows that stay."""

_LENGTHS = 4  # strata of lengths
_FEW = 50  # different values that a column may have, or else a tenth of its rows


def left_out(report: PromptReport, remove: Remove = "near", held_out: Iterable[str] = ()) -> dict[str, np.ndarray]:
    """
    Return which rows are left out, and why.

    The first of several duplicates in a set stays. Rows with different answers are no duplicates: a preference set has
    many pairs for one prompt. A held-out set loses only its own duplicates; other sets lose what they share with it.

    Args:
        report: of [`examine_prompts`].
        remove: which duplicates are left out. `none` leaves out empty prompts alone.
        held_out: names of the sets to evaluate on.

    Returns:
        Set → (rows of the set,) places in `REASONS`.
    """
    held_out = [name for name in report.sets if name in {*held_out}]
    reasons = {}
    for name, rows in report.sets.items():
        reason = np.where(report.filled(name), 0, REASONS.index("empty"))
        if remove != "none":
            groups = getattr(report.duplicates, remove)[report.places[name]]
            if name not in held_out:
                shared = report.shared(name, held_out, remove)
                reason[shared & (reason == 0)] = REASONS.index("shared with a held-out set")
            _, firsts = np.unique(np.stack([groups, rows.answer_keys()]), axis=1, return_index=True)
            again = np.ones(len(rows), bool)
            again[firsts] = False
            reason[again & (reason == 0)] = REASONS.index("duplicate")
        reasons[name] = reason
    return reasons


def strata(report: PromptReport, name: str, columns: Sequence[str]) -> list[tuple]:
    """
    Return the values of each row of a set that are to be spread over splits, or balanced.

    Args:
        report: of [`examine_prompts`].
        name: name of the set.
        columns: columns of the set; `length`, quarters of the set by words, and `script`, unless there is a column
            of that name.

    Raises:
        ValueError: there is no such column, or nearly every row has its own value in it.
    """
    each = []
    prompts = report.sets[name]
    for column in columns:
        if column in prompts.rows.column_names:
            values = [value for part in prompts.column_values(column) for value in part]
        elif column == "length":
            words = report.words[report.places[name]]
            bounds = np.quantile(words, np.arange(1, _LENGTHS) / _LENGTHS, method="higher")
            labels = [f"up to {bound} words" for bound in bounds] + ["more words"]
            values = [labels[place] for place in np.searchsorted(bounds, words)]
        elif column == "script":
            values = report.scripts[report.places[name]].tolist()
        else:
            found = ", ".join(map(repr, prompts.rows.column_names))
            raise ValueError(f"set {name!r} lacks the column {column!r}; it has {found}, and `length` and `script`")
        values = [value if isinstance(value, (str, int, type(None))) else repr(value) for value in values]
        different = len(set(values))
        if different > max(_FEW, len(values) / 10):
            raise ValueError(
                f"set {name!r} has {different} different values in the column {column!r}, in {len(values)} rows: "
                "choose one with fewer"
            )
        each.append(values)
    return list(zip(*each, strict=True))


def divide(
    report: PromptReport,
    reasons: dict[str, np.ndarray],
    shares: Mapping[str, float],
    names: Sequence[str],
    columns: Sequence[str] = (),
    held_out: Iterable[str] = (),
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """
    Divide sets into splits that no group of near duplicates straddles, within a set or between sets.

    Args:
        report: of [`examine_prompts`].
        reasons: of [`left_out`]; rows that are left out are in no split.
        shares: split → share of the rows, with the sum 1.
        names: sets to divide.
        columns: columns whose values all splits should have in equal shares, see [`strata`].
        held_out: sets to evaluate on. Rows whose group has a row of another set that is not divided go to the largest
            split.
        seed: seed of the order.

    Returns:
        Set → (rows of the set,) the name of the split, "" for what is left out.
    """
    near = report.duplicates.near
    kept = {name: reasons[name] == 0 for name in names}
    groups = np.concatenate([near[report.places[name]][kept[name]] for name in names])
    of_rows: list[Any] = []
    for name in names:
        values = strata(report, name, columns) if columns else [()] * len(report.sets[name])
        of_rows += [(name, *value) for value, is_kept in zip(values, kept[name], strict=True) if is_kept]
    splits = split_groups(groups, shares, of_rows, seed)
    whole = [name for name in report.sets if name not in {*names, *held_out}]
    trained = [near[report.places[name]][reasons[name] == 0] for name in whole]
    if trained:
        splits[np.isin(groups, np.concatenate(trained))] = max(shares, key=lambda name: shares[name])
    result = {}
    for name, part in zip(names, np.split(splits, np.cumsum([kept[name].sum() for name in names])[:-1]), strict=True):
        result[name] = np.full(len(report.sets[name]), "", object)
        result[name][kept[name]] = part
    return result


def balance(
    report: PromptReport,
    reasons: dict[str, np.ndarray],
    names: Sequence[str],
    columns: Sequence[str],
    most: int | None = None,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """
    Leave out rows at random until no value has more rows than the rarest, or than `most`.

    Args:
        report: of [`examine_prompts`].
        reasons: of [`left_out`].
        names: sets to balance.
        columns: columns whose values are balanced, see [`strata`].
        most: rows of one value; None takes as many as the rarest has.
        seed: seed of the choice.

    Returns:
        A copy of `reasons` with the rows that are left out for balance.
    """
    result = dict(reasons)
    for name in names:
        rows = np.flatnonzero(reasons[name] == 0)
        values = strata(report, name, columns)
        keep = balanced_rows([values[row] for row in rows], most, seed)
        result[name] = reasons[name].copy()
        result[name][rows[~keep]] = REASONS.index("balance")
    return result
