"""Choose which rows of examined data sets are left out, and into which split each other row goes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from ...data import balanced_rows, split_groups
from .examine import PromptReport

Remove = Literal["near", "exact", "none"]
REASONS = ("", "empty", "shared with a held-out set", "duplicate", "balance")
"""Why a row is left out; "" for rows that stay."""

_LENGTHS = 4  # strata of lengths
_FEW = 50  # most different values of a column, or a tenth of the rows if that is more


def left_out(report: PromptReport, remove: Remove = "near", held_out: Iterable[str] = ()) -> dict[str, np.ndarray]:
    """
    Return for each row whether it is left out, and why.

    Of several duplicates in a set the first stays. Rows with different answers are no duplicates, since a preference
    set has many pairs for one prompt. A held-out set loses only its own duplicates; every other set also loses the
    rows that it shares with a held-out set.

    Args:
        report: report of [`examine_prompts`].
        remove: which duplicates are left out. With `none` only empty prompts are.
        held_out: names of the sets to evaluate on.

    Returns:
        A set's name → (rows of the set,) int, why each row is left out, as a place in `REASONS`; 0 for rows that stay.
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
    Return for each row of a set its values in `columns`, to stratify splits by them or to balance them.

    Args:
        report: report of [`examine_prompts`].
        name: name of the set.
        columns: names of columns of the set. Unless the set has a column of that name, `length` stands for the quarter
            of the set, by number of words, that the prompt is in, and `script` for the prompt's script.

    Raises:
        ValueError: the set lacks a column, or a column has more different values than 50 and than a tenth of the rows.
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
            raise ValueError(f"set {name!r} lacks the column {column!r}: choose one of {found}, `length`, `script`")
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
    Divide sets into splits, and keep all near duplicates, of one set or of several, in the same split.

    Args:
        report: report of [`examine_prompts`].
        reasons: result of [`left_out`]; rows that are left out are in no split.
        shares: a split's name → its share of the rows; the sum of the shares is 1.
        names: names of the sets to divide.
        columns: columns whose values all splits should have in equal shares, see [`strata`].
        held_out: names of the sets to evaluate on. If a set is neither divided nor held out, near duplicates of its
            rows go to the split with the largest share.
        seed: seed of the order.

    Returns:
        A set's name → (rows of the set,) the name of each row's split, "" for rows that are left out.
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
    Leave out rows at random until no value in `columns` has more rows than the rarest value, or than `most`.

    Args:
        report: report of [`examine_prompts`].
        reasons: result of [`left_out`].
        names: names of the sets to balance.
        columns: columns whose values are balanced, see [`strata`].
        most: largest number of rows with one value; None takes as many as the rarest value has.
        seed: seed of the random choice.

    Returns:
        A copy of `reasons` in which the rows that are now left out have the reason `balance`.
    """
    result = dict(reasons)
    for name in names:
        rows = np.flatnonzero(reasons[name] == 0)
        values = strata(report, name, columns)
        keep = balanced_rows([values[row] for row in rows], most, seed)
        result[name] = reasons[name].copy()
        result[name][rows[~keep]] = REASONS.index("balance")
    return result
