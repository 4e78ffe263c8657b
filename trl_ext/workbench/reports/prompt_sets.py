"""Examine the prompts of datasets for duplicates, lengths, scripts and copied answers; choose rows and splits."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from datasets import Dataset

from ... import evaluation
from ...data import content_of, is_messages, split_groups

By = Literal["conversation", "last_turn"]
Kind = Literal["near", "exact", "none"]
REASONS = ("empty", "shared with a held-out set", "duplicate")
"""Why a row is left out; "" for rows that stay."""

PROMPT_COLUMNS = ("prompt", "messages", "chosen", "text")  # the first one that a set has is taken
_ANSWER_COLUMNS = ("completion", "chosen", "messages")
_WITH_ANSWERS = ("completion", "chosen", "rejected", "messages", "label", "completions", "labels")
_LENGTHS = 4  # strata of lengths


@dataclass(frozen=True, eq=False)
class PromptSet:
    """
    Hold a dataset, and find the prompts in it.

    Args:
        name: name of the dataset in reports.
        rows: the dataset.
        column: the column of the prompts, which are texts or messages. In a column `messages` or `chosen`, all turns
            but the last are the prompt. The default is the first of `prompt`, `messages`, `chosen` and `text` that the
            dataset has.

    Raises:
        ValueError: the dataset lacks the column, or the column is `chosen` and holds texts, in which nothing separates
            the prompt from the answer.
    """

    name: str
    rows: Dataset
    column: str = ""

    def __post_init__(self):
        columns = self.rows.column_names
        column = self.column or next((name for name in PROMPT_COLUMNS if name in columns), "")
        if column not in columns or (column == "chosen" and isinstance(self.rows[0][column], str)):
            why = ", since texts do not show where their prompt ends" if column in columns else ""
            raise ValueError(
                f"set {self.name!r} has no prompts in {column or ' or '.join(PROMPT_COLUMNS)}{why}: name its column "
                f"of prompts by `--columns {self.name}=COLUMN` (in Python `column`), one of {', '.join(columns)}"
            )
        object.__setattr__(self, "column", column)

    def __len__(self) -> int:
        return len(self.rows)

    def prompts(self, by: By = "conversation") -> Iterator[str]:
        """Yield each row's prompt as one text: all turns, or the user's last one if `by` is `"last_turn"`."""
        return (_text(value, self.column, by) for value in self.rows[self.column])

    def prompt(self, row: int, by: By = "conversation") -> str:
        """Return the prompt of one row as a text, as [`prompts`] yields it."""
        return _text(self.rows[row][self.column], self.column, by)

    def answers(self) -> list[str] | None:
        """
        Return each row's answer in lower case, with single spaces; of messages, the last one's text.

        Answers are in the first of the columns `completion`, `chosen` and `messages` that there is; None without one.
        """
        column = next((name for name in _ANSWER_COLUMNS if name in self.rows.column_names), None)
        if column is None:
            return None
        last = (content_of(value[-1]) if is_messages(value) else value for value in self.rows[column])
        return [evaluation.normalised(answer or "") for answer in last]

    def answer_keys(self) -> list[str]:
        """Return a text for each row, such that rows with equal answers have equal texts."""
        columns = [name for name in _WITH_ANSWERS if name in self.rows.column_names]
        return [repr(row) for row in self.rows.select_columns(columns)] if columns else [""] * len(self.rows)


def _text(value: Any, column: str, by: By) -> str:
    if not is_messages(value):
        return value or ""
    turns = value[:-1] if column in ("chosen", "messages") else value  # what is left out is the answer
    asked = [turn for turn in turns if turn["role"] == "user"]
    return "\n".join(map(content_of, turns if by == "conversation" else (asked or turns)[-1:]))


@dataclass(frozen=True, eq=False)
class PromptReport:
    """
    Hold the results of [`examine_prompts`]. Arrays have an entry for each row of each set, one set after the other.

    Args:
        sets: the sets, by name.
        places: maps each set's name to the slice of the arrays that has the set's rows.
        duplicates: groups of exact and near duplicates, which may hold rows of several sets.
        words: number of words of each prompt.
        scripts: for each prompt the script that most of its letters have.
        copied: maps a set's name to a share for each of its answers: of the answer's runs of `copied_words` words,
            the share that also occurs in the corpus. The sets that make the corpus are not in it.
    """

    sets: dict[str, PromptSet]
    places: dict[str, slice]
    duplicates: evaluation.Duplicates
    words: np.ndarray
    scripts: np.ndarray
    copied: dict[str, np.ndarray]

    def repeated(self, name: str, kind: Kind) -> np.ndarray:
        """
        Return for each row of the set `name` whether it is a duplicate, exact or near (`kind`), of an earlier row of
        that set.
        """
        groups = getattr(self.duplicates, kind)[self.places[name]]
        return _again(groups) & (groups >= 0)

    def shared(self, name: str, others: Iterable[str], kind: Kind) -> np.ndarray:
        """
        Return for each row of the set `name` whether it has a duplicate, exact or near (`kind`), in any of the sets
        `others`.
        """
        groups = getattr(self.duplicates, kind)
        mine = groups[self.places[name]]
        theirs = [groups[self.places[other]] for other in others if other != name]
        return np.isin(mine, np.concatenate([np.zeros(0, int), *theirs])) & (mine >= 0)


def _again(values: Sequence[Any] | np.ndarray) -> np.ndarray:
    """Return for each value whether it equals an earlier value."""
    seen: set[Any] = set()
    again = []
    for value in values:
        again.append(value in seen)
        seen.add(value)
    return np.array(again, bool)


def examine_prompts(
    sets: Sequence[PromptSet],
    by: By = "conversation",
    threshold: float = 0.7,
    unit: evaluation.Unit = "words",
    n: int = 3,
    copied_from: Sequence[str] = (),
    copied_words: int = 13,
    seed: int = 0,
) -> PromptReport:
    """
    Find the duplicates, lengths, scripts and copied answers of datasets with prompts.

    Args:
        sets: sets with different names.
        by: whether chat prompts are compared by all turns, or by the user's last one.
        threshold, unit, n: they define near duplicates, see [`find_duplicates`].
        copied_from: names of the sets whose answers make the corpus. The answers of all other sets are compared with
            this corpus.
        copied_words: how many words in a row count as a copy.
        seed: seed of the hashes.
    """
    named = {each.name: each for each in sets}
    ends = np.cumsum([len(each) for each in sets]).tolist()
    places = {each.name: slice(end - len(each), end) for each, end in zip(sets, ends, strict=True)}
    words: list[int] = []
    scripts: list[str] = []

    def read() -> Iterator[str]:
        for each in sets:
            for text in each.prompts(by):
                words.append(len(evaluation.words_of(text)))
                scripts.append(evaluation.main_script(text))
                yield text

    duplicates = evaluation.find_duplicates(read(), threshold, unit, n, seed)
    copied = {}
    if copied_from:
        corpus = evaluation.corpus_ngrams(
            (text for name in copied_from for text in named[name].answers() or ()), copied_words
        )
        answers = {name: each.answers() for name, each in named.items() if name not in copied_from}
        copied = {
            name: evaluation.copied_shares(texts, corpus, copied_words) for name, texts in answers.items() if texts
        }
    return PromptReport(named, places, duplicates, np.array(words), np.array(scripts), copied)


def left_out(report: PromptReport, remove: Kind = "near", held_out: Iterable[str] = ()) -> dict[str, np.ndarray]:
    """
    Return for each row whether it is left out, and why.

    Of several duplicates within a set, the first is kept. Rows with different answers are no duplicates, since a
    preference set has many pairs for one prompt. From a held-out set, only duplicates within the set are left out;
    from every other set, the rows that it shares with a held-out set are left out, too.

    Args:
        report: report of [`examine_prompts`].
        remove: which duplicates are left out. With `none`, only empty prompts are left out.
        held_out: names of the sets to evaluate on.

    Returns:
        A dict from each set's name to an array with a text for each row: one of `REASONS`, or "" if the row is kept.
    """
    held_out = {*held_out}
    reasons = {}
    empty, shared, duplicate = REASONS
    for name, rows in report.sets.items():
        reason = np.full(len(rows), "", object)
        if remove != "none":
            groups = getattr(report.duplicates, remove)[report.places[name]].tolist()
            reason[_again([*zip(groups, rows.answer_keys(), strict=True)])] = duplicate
            if name not in held_out:
                reason[report.shared(name, held_out, remove)] = shared
        reason[report.duplicates.exact[report.places[name]] < 0] = empty
        reasons[name] = reason
    return reasons


def strata(report: PromptReport, name: str, columns: Sequence[str]) -> list[tuple[str, ...]]:
    """
    Return for each row of a set a tuple of its values in `columns`, as texts, to stratify splits by them.

    Args:
        report: report of [`examine_prompts`].
        name: name of the set.
        columns: names of columns of the set, or `length` or `script`. If the set has no column `length`, this is the
            quarter of the set, by number of words, that the prompt is in. If it has no column `script`, this is the
            script that most of the prompt's letters have.
    """
    prompts = report.sets[name]
    place = report.places[name]
    words = report.words[place]
    own = {
        "script": report.scripts[place],
        "length": np.searchsorted(np.quantile(words, np.arange(1, _LENGTHS) / _LENGTHS, method="higher"), words),
    }
    has = {column: prompts.rows[column] if column in prompts.rows.column_names else own[column] for column in columns}
    return [*zip(*([str(value) for value in values] for values in has.values()), strict=True)]


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

    If a set is neither divided nor held out, near duplicates of its rows go to the split with the largest share.

    Args:
        report: report of [`examine_prompts`].
        reasons: result of [`left_out`]; rows that are left out are in no split.
        shares: each split's share of the rows, by name; the shares sum to 1.
        names: names of the sets to divide.
        columns: columns whose values all splits should have in equal shares, see [`strata`].
        held_out: names of the sets to evaluate on.
        seed: seed of the order.

    Returns:
        A dict from each of `names` to an array with the split's name for each row, "" if the row is left out.
    """
    near = report.duplicates.near
    kept = {name: reasons[name] == "" for name in report.sets}
    groups = np.concatenate([near[report.places[name]][kept[name]] for name in names])
    of_rows: list[Any] = []
    for name in names:
        values = strata(report, name, columns) if columns else [()] * len(report.sets[name])
        of_rows += [(name, *values[row]) for row in np.flatnonzero(kept[name])]
    splits = split_groups(groups, shares, of_rows, seed)
    whole = [near[report.places[name]][kept[name]] for name in report.sets if name not in {*names, *held_out}]
    in_whole = np.isin(groups, np.concatenate([np.zeros(0, int), *whole]))
    splits[in_whole] = max(shares, key=lambda name: shares[name])
    result = {}
    dealt = iter(splits)
    for name in names:
        result[name] = np.array([next(dealt) if is_kept else "" for is_kept in kept[name]], object)
    return result
