"""Examine the prompts of data sets: duplicates, lengths, languages, copied answers."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import xxhash
from datasets import Dataset

from ...data import content_of, is_messages, is_text
from ...evaluation import (
    Duplicates,
    Unit,
    copied_shares,
    corpus_ngrams,
    count_words,
    find_duplicates,
    in_parts,
    main_scripts,
    normalised,
)
from ...upstream import is_installed

By = Literal["conversation", "last_turn"]
PROMPT_COLUMNS = ("prompt", "messages", "chosen", "text")  # the first one that a set has is taken
_ANSWER_COLUMNS = ("completion", "chosen", "messages")
_WITH_ANSWERS = ("completion", "chosen", "rejected", "messages", "label", "completions", "labels")
_ROWS = 1000  # read at a time
_LEAST_WORDS = 5  # the language of fewer words is often guessed wrong
_LANGUAGES_OF = 2000  # most rows of each set whose language is guessed


@dataclass(frozen=True, eq=False)
class PromptSet:
    """
    Hold a data set and say where its prompts are.

    Args:
        name: what reports call it.
        rows: the data set.
        column: the column of the prompts, which are texts or messages. In a column `messages` the turns before the
            last answer are the prompt, in a column `chosen` all turns but the last. The default is the first of
            `prompt`, `messages`, `chosen` and `text` that the data set has.

    Raises:
        ValueError: the data set lacks the column or has no row, or the column is `chosen` and holds texts, in which
            nothing separates the prompt from the answer.
    """

    name: str
    rows: Dataset
    column: str = ""

    def __post_init__(self):
        found = self.rows.column_names
        column = self.column or next((name for name in PROMPT_COLUMNS if name in found), "")
        if column not in found:
            wanted = f"the column {column!r}" if column else f"a column {', '.join(map(repr, PROMPT_COLUMNS))}"
            raise ValueError(
                f"set {self.name!r} lacks {wanted}; it has {', '.join(map(repr, found))}: name one of these by "
                "`columns`"
            )
        if not len(self.rows):
            raise ValueError(f"set {self.name!r} has no rows: leave it out")
        if column == "chosen" and isinstance(self.rows[0]["chosen"], str):
            raise ValueError(
                f"set {self.name!r} has no column 'prompt', and the texts in 'chosen' do not show where the prompt "
                "ends: add the column"
            )
        object.__setattr__(self, "column", column)

    def __len__(self) -> int:
        return len(self.rows)

    def column_values(self, column: str) -> Iterator[list]:
        """
        Yield the values of a column, some rows at a time.

        Raises:
            ValueError: a text is not UTF-8.
        """
        for rows in self._read([column]):
            yield [row[column] for row in rows]

    def rows_at(self, places: Sequence[int] | np.ndarray) -> Iterator[dict[str, Any]]:
        """Yield the rows at `places`, with all columns; raise `ValueError` if a text is not UTF-8."""
        for rows in self._read(self.rows.column_names, places):
            yield from rows

    def _read(self, columns: Sequence[str], places: Any = None) -> Iterator[list[dict[str, Any]]]:
        rows = self.rows.select_columns(list(columns))
        for table in (rows if places is None else rows.select(places)).with_format("arrow").iter(_ROWS):
            try:
                yield table.to_pylist()
            except UnicodeDecodeError as error:  # Arrow reads a file without looking
                raise ValueError(
                    f"set {self.name!r} has text that is not UTF-8 ({error}): convert the file"
                ) from error

    def turns(self) -> Iterator[list[list[str]]]:
        """
        Yield, some rows at a time, the texts of each prompt's turns, with the user's last turn moved to the end.

        Raises:
            ValueError: a prompt is neither text nor messages, nor missing.
        """
        place = 0
        for values in self.column_values(self.column):
            for row, value in enumerate(values, place):
                if not (value is None or value == [] or is_text(value)):
                    raise ValueError(
                        f"set {self.name!r}: the column {self.column!r} must hold text or messages, but row {row} has "
                        f"{repr(value)[:60]}: correct it, or leave it out"
                    )
            yield [_turns(value, self.column) for value in values]
            place += len(values)

    def prompt(self, row: int, by: By = "conversation") -> str:
        """Return the prompt of a row as one text: all turns, or the user's last one if `by` is `"last_turn"`."""
        return _text(_turns(self.rows[int(row)][self.column], self.column), by)

    def answers(self) -> Iterator[str] | None:
        """
        Return all answers, normalised.

        They come from the first column that the set has of `completion`, `chosen` and `messages`, and in messages from
        the last turn. Return None if the set has none of these columns.
        """
        column = next((name for name in _ANSWER_COLUMNS if name in self.rows.column_names), None)
        if column is None:
            return None
        return (normalised(_answer(value)) for values in self.column_values(column) for value in values)

    def answer_keys(self) -> np.ndarray:
        """Return a number for each row: equal answers have equal numbers. Without answers, all numbers are 0."""
        columns = [name for name in _WITH_ANSWERS if name in self.rows.column_names]
        if not columns:
            return np.zeros(len(self.rows), np.int64)
        keys = [
            xxhash.xxh3_64_intdigest(repr(row).encode(errors="surrogatepass"))
            for rows in self._read(columns)
            for row in rows
        ]
        return np.array(keys, np.uint64).view(np.int64)


def _turns(value: Any, column: str) -> list[str]:
    """Return the texts of a prompt's turns, with the user's last turn moved to the end."""
    if not is_messages(value):
        return [value or ""]
    if column == "chosen":
        value = value[:-1]
    if column == "messages":
        answers = [place for place, message in enumerate(value) if message["role"] == "assistant"]
        value = value[: answers[-1]] if answers else value
    asked = [place for place, message in enumerate(value) if message["role"] == "user"]
    last = asked[-1] if asked else len(value) - 1
    return [content_of(message) for message in (*value[:last], *value[last + 1 :], *value[last : last + 1])]


def _text(turns: list[str], by: By) -> str:
    return "\n".join(turns) if by == "conversation" else turns[-1] if turns else ""


def _answer(value: Any) -> str:
    return content_of(value[-1]) if is_messages(value) else value if isinstance(value, str) else ""


@dataclass(frozen=True, eq=False)
class PromptReport:
    """
    Hold what [`examine_prompts`] found. Arrays have an entry for each row of each set, one set after the other.

    Args:
        sets: a set's name → the set.
        places: a set's name → the slice of the arrays that holds its rows.
        duplicates: groups of exact and near duplicates, which may hold rows of several sets.
        words, characters: length of each prompt.
        scripts: for each prompt the script that most of its letters have, as a place in `SCRIPTS`.
        other_view: for each prompt the number of its group of exact duplicates, by the value of `by` that was not
            chosen. None if no prompt has several turns.
        languages: a set's name → language → share of the rows whose language was guessed; None without py3langid.
        copied: a set's name → for each answer, the share of its runs of words that also occur in the corpus.
    """

    sets: dict[str, PromptSet]
    places: dict[str, slice]
    duplicates: Duplicates
    words: np.ndarray
    characters: np.ndarray
    scripts: np.ndarray
    other_view: np.ndarray | None
    languages: dict[str, dict[str, float]] | None
    copied: dict[str, np.ndarray]

    def filled(self, name: str) -> np.ndarray:
        """Return for each prompt of the set `name` whether it has any text."""
        return self.duplicates.exact[self.places[name]] >= 0

    def repeated(self, name: str, kind: Literal["exact", "near"]) -> np.ndarray:
        """Return for each row of the set `name` whether it is a duplicate of an earlier row of that set."""
        groups = getattr(self.duplicates, kind)[self.places[name]]
        repeated = np.ones(len(groups), bool)
        repeated[np.unique(groups, return_index=True)[1]] = False
        return repeated & (groups >= 0)

    def shared(self, name: str, others: Iterable[str], kind: Literal["exact", "near"]) -> np.ndarray:
        """Return for each row of the set `name` whether its group of duplicates has a row of one of the `others`."""
        groups = getattr(self.duplicates, kind)
        theirs = [groups[self.places[other]] for other in others if other != name]
        mine = groups[self.places[name]]
        return np.isin(mine, np.concatenate(theirs)) & (mine >= 0) if theirs else np.zeros(len(mine), bool)


def examine_prompts(
    sets: Sequence[PromptSet],
    by: By = "conversation",
    threshold: float = 0.7,
    unit: Unit = "words",
    n: int = 3,
    num_perm: int = 128,
    copied_from: Sequence[str] = (),
    copied_words: int = 13,
    seed: int = 0,
) -> PromptReport:
    """
    Find the duplicates, lengths, scripts, languages and copied answers of data sets with prompts.

    Args:
        sets: sets with different names.
        by: whether chat prompts are compared by all turns, or by the user's last one.
        threshold, unit, n, num_perm: what counts as a near duplicate, see [`find_duplicates`].
        copied_from: names of the sets whose answers make the corpus. The answers of all other sets are compared with
            this corpus.
        copied_words: how many words in a row make a copy.
        seed: seed of the hashes, and of the choice of rows whose language is guessed.

    Raises:
        ValueError: a prompt is neither text nor messages, nor missing; two sets have the same name; `copied_from`
            names no set, or one without answers; or a setting is out of range.
        ImportError: datasketch is missing.
    """
    named = {each.name: each for each in sets}
    if len(named) < len(sets) or not sets:
        raise ValueError(f"give one set or more, with different names, got {[each.name for each in sets]}")
    ends = np.cumsum([len(each) for each in sets]).tolist()
    places = {each.name: slice(end - len(each), end) for each, end in zip(sets, ends, strict=True)}
    words: list[np.ndarray] = []
    scripts: list[np.ndarray] = []
    characters: list[np.ndarray] = []
    others: list[np.ndarray] = []
    is_chat = False

    def read() -> Iterator[str]:
        nonlocal is_chat
        for each in sets:
            for rows in each.turns():
                texts = [_text(turns, by) for turns in rows]
                for part in in_parts(texts):
                    words.append(count_words(part))
                    scripts.append(main_scripts(part))
                characters.append(np.array([*map(len, texts)]))
                is_chat |= any(len(turns) > 1 for turns in rows)
                other: By = "last_turn" if by == "conversation" else "conversation"
                others.append(np.array([hash(normalised(_text(turns, other))) for turns in rows]))
                yield from texts

    duplicates = find_duplicates(read(), threshold, unit, n, num_perm, seed)
    other_view = np.unique(np.concatenate(others), return_inverse=True)[1] if is_chat else None
    copied = {}
    if copied_from:
        corpus = corpus_ngrams((text for name in copied_from for text in _answers(named, name)), copied_words)
        for name in named.keys() - {*copied_from}:
            if (answers := named[name].answers()) is not None:
                shares = [copied_shares(part, corpus, copied_words) for part in in_parts(answers)]
                copied[name] = np.concatenate(shares)
    return PromptReport(
        named,
        places,
        duplicates,
        np.concatenate(words),
        np.concatenate(characters),
        np.concatenate(scripts),
        other_view,
        {name: _languages(each, by, seed) for name, each in named.items()} if is_installed("py3langid") else None,
        {name: copied[name] for name in named if name in copied},
    )


def _answers(sets: dict[str, PromptSet], name: str) -> Iterator[str]:
    if name not in sets:
        raise ValueError(f"there is no set {name!r} to look for copies of; the sets are {', '.join(sets)}")
    answers = sets[name].answers()
    if answers is None:
        raise ValueError(
            f"set {name!r} has no answers: it has none of the columns {', '.join(map(repr, _ANSWER_COLUMNS))}"
        )
    return answers


def _languages(prompts: PromptSet, by: By, seed: int) -> dict[str, float]:
    """Guess the language of 2,000 rows at most; return language → share, with "" for prompts too short to guess."""
    import py3langid

    size = len(prompts)
    rows = np.sort(np.random.default_rng(seed).choice(size, min(size, _LANGUAGES_OF), replace=False))
    drawn = prompts.rows.select(rows)
    texts = [_text(_turns(value, prompts.column), by) for value in drawn[prompts.column]]
    long = count_words(texts) >= _LEAST_WORDS
    guessed = [py3langid.classify(text)[0] if is_long else "" for text, is_long in zip(texts, long, strict=True)]
    return {language: count / len(texts) for language, count in Counter(guessed).most_common()}
