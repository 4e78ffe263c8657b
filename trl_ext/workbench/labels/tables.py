"""Read tables of labels, long, wide or of rankings, as arrays of items, annotators and choices."""

import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from datasets import Dataset

FIRST, SECOND, TIE = range(3)
_ROWS = 50_000  # read at a time: of the texts only hashes are kept
_EMPTY = pd.util.hash_array(np.array([""], dtype=object))[0]


@dataclass(frozen=True)
class Columns:
    """
    Name the columns of a table of labels.

    Args:
        prompt: the column of the prompt, as text or messages.
        responses: the columns of the answers, in the order in which they were shown: two, or more if `scores` rank
            them. Give one column if each row has one answer and its score: then the answers that one annotator scored
            for a prompt are compared with each other, in the order of their rows.
        annotator: in a long table (a row for each label) the column of who chose.
        choice: in a long table the column of what was chosen.
        annotators: in a wide table (a row for each pair) one column for each annotator, which has the annotator's name
            and holds the choices. They take the place of `annotator` and `choice`.
        scores: one column of scores for each of `responses`, in the same order. They take the place of `choice`. The
            answer with the higher score wins, equal scores are a tie, and an answer without a score is not compared.
        lowest_wins: whether scores are ranks: 1 is the best.
        values: the values of a choice. The first one means the first answer, the second one the second answer, and all
            further ones a tie.
    """

    prompt: str = "prompt"
    responses: tuple[str, ...] = ("response_a", "response_b")
    annotator: str = "annotator"
    choice: str = "choice"
    annotators: tuple[str, ...] = ()
    scores: tuple[str, ...] = ()
    lowest_wins: bool = False
    values: tuple[str, ...] = ("a", "b", "tie")

    @property
    def names(self) -> list[str]:
        """Return the names of all columns that are read."""
        labels = self.annotators or (self.annotator, *(self.scores or (self.choice,)))
        return [self.prompt, *self.responses, *labels]


@dataclass(frozen=True)
class Labels:
    """
    Hold L labels of I items by A annotators as arrays; an annotator has at most one label of an item.

    An item is a prompt with two different answers. Rows with the same prompt and the same two answers, in any order,
    are one item.

    Args:
        item: (L,) int, the labelled item.
        annotator: (L,) int, who gave the label, as a place in `annotators`.
        choice: (L,) int, `FIRST`, `SECOND` or `TIE`, in the order of the answers in the item's first row.
        swapped: (L,) bool, whether the annotator was shown the answers in the reverse order of the item's first row.
        annotators: (A,) names.
        prompt: (I,) int, a number for the prompt; the same prompt has the same number.
        answers: (I, 2) int, a number for each answer; the same answer to the same prompt has the same number.
        cells: (I, 2) int, where the two answers are in the table: row · number of response columns + column.
        missing: how many rows have no label, or no annotator; a wide table's cells count as rows.
        repeats: how often an annotator labelled an item again. Equal labels count once.
        contradictions: how often an annotator's labels of one item differ. All of these are left out.
    """

    item: np.ndarray
    annotator: np.ndarray
    choice: np.ndarray
    swapped: np.ndarray
    annotators: list[str]
    prompt: np.ndarray
    answers: np.ndarray
    cells: np.ndarray
    missing: int = 0
    repeats: int = 0
    contradictions: int = 0

    def __len__(self) -> int:
        return len(self.item)

    def where(self, kept: np.ndarray) -> "Labels":
        """Return the labels for which `kept`, (L,) bool, is True; items and annotators keep their places."""
        return replace(
            self, **{name: getattr(self, name)[kept] for name in ("item", "annotator", "choice", "swapped")}
        )

    def counts(self) -> np.ndarray:
        """Return how often each item was labelled `FIRST`, `SECOND`, `TIE`: (I, 3) int."""
        return np.bincount(self.item * 3 + self.choice, minlength=3 * len(self.cells)).reshape(-1, 3)


def read_labels(dataset: Dataset, columns: Columns | None = None) -> Labels:
    """
    Read a table of labels part by part; of the texts only hashes are kept.

    Args:
        dataset: the table.
        columns: which column holds what; by default, the columns that `Columns()` names.

    Raises:
        ValueError: a choice is not in `columns.values`, a score is not a number, or there is no label.
    """
    columns = columns or Columns()
    size, table = len(columns.responses), _hashed(dataset, columns)
    who, names = pd.factorize(_said(table[columns.annotator]))
    scores = _scores(table, columns)
    known = scores.notna().to_numpy() & (who >= 0)[:, None] & (table[[*columns.responses]] != _EMPTY).to_numpy()
    # A cell is an answer with what one annotator says of it; each two cells of a row are a label, or, where a row has
    # one answer, each two of a prompt
    cells = pd.concat(
        pd.DataFrame(
            {
                "row": table["row"] if size > 1 else 0,
                "annotator": who,
                "prompt": table[columns.prompt],
                "cell": table["row"] * size + place,
                "answer": table[response],
                "score": scores[place],
            }
        )[known[:, place]]
        for place, response in enumerate(columns.responses)
    )
    pairs = cells.merge(cells, on=["row", "annotator", "prompt"], suffixes=("", "_b"))
    pairs = pairs[(pairs["cell"] < pairs["cell_b"]) & (pairs["answer"] != pairs["answer_b"])]
    pairs = pairs.sort_values(["cell", "cell_b"], kind="stable")
    if not len(pairs):
        raise ValueError(f"the table has {len(dataset)} rows, but no label of two different answers")
    both = pairs["answer"], pairs["answer_b"]
    pairs["item"] = pairs.groupby(["prompt", np.minimum(*both), np.maximum(*both)], sort=False).ngroup()
    pairs["swapped"] = pairs["answer"] != pairs.groupby("item")["answer"].transform("first")
    margin = (pairs["score"] - pairs["score_b"]) * np.where(pairs["swapped"], -1, 1)
    pairs["choice"] = np.select([margin > 0, margin < 0], [FIRST, SECOND], TIE)
    of_one = ["item", "annotator"]
    is_first, choices = ~pairs.duplicated(of_one), pairs.groupby(of_one)["choice"]
    differs = choices.transform("min") != choices.transform("max")
    items, kept = pairs.drop_duplicates("item"), pairs[is_first & ~differs]
    answers = pd.concat(
        [items[["prompt", name]].set_axis(["prompt", "answer"], axis=1) for name in ("answer", "answer_b")]
    )
    return Labels(
        **{name: kept[name].to_numpy() for name in (*of_one, "choice", "swapped")},
        annotators=names.tolist(),
        prompt=pd.factorize(items["prompt"])[0],
        answers=answers.groupby(["prompt", "answer"]).ngroup().to_numpy().reshape(2, -1).T,
        cells=items[["cell", "cell_b"]].to_numpy(),
        missing=int((scores.isna().all(axis=1) | (who < 0)).sum()),
        repeats=int((~is_first).sum()),
        contradictions=int((differs & is_first).sum()),
    )


def _hashed(dataset: Dataset, columns: Columns) -> pd.DataFrame:
    """Return the table with the number of each `row`, and hashes for texts; a wide table becomes a long one."""
    texts, parts = [columns.prompt, *columns.responses], []

    def text_of(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value, sort_keys=True) if value else ""

    for batch in dataset.select_columns(list(dict.fromkeys(columns.names))).iter(_ROWS):
        part = pd.DataFrame(batch, dtype=object)
        for name in texts:
            part[name] = pd.util.hash_array(np.array([*map(text_of, part[name])], object), categorize=False)
        parts.append(part)
    table = pd.concat(parts, ignore_index=True).rename_axis("row").reset_index()
    if columns.annotators:
        table = table.melt(["row", *texts], [*columns.annotators], columns.annotator, columns.choice)
    return table


def _said(column: pd.Series) -> pd.Series:
    """Return names or choices as text, without the spaces around them; a 1 that gaps in a CSV file made 1.0 is "1"."""
    return column.convert_dtypes().astype("string").str.strip().replace("", pd.NA)


def _scores(table: pd.DataFrame, columns: Columns) -> pd.DataFrame:
    """Return a score for each answer; a choice gives its answer 1 and the other one 0, a tie ½ to both."""
    if columns.scores:
        scores = table[[*columns.scores]].apply(pd.to_numeric) * (-1 if columns.lowest_wins else 1)
        return scores.set_axis(range(len(columns.responses)), axis=1)
    choice = _said(table[columns.choice])
    if len(unknown := choice[choice.notna() & ~choice.isin(columns.values)]):
        raise ValueError(
            f"the column {columns.choice!r} holds {unknown.iloc[0]!r} in row {table['row'][unknown.index[0]]}, not "
            f"one of {', '.join(columns.values)}: name the values that mean the first answer, the second and a tie"
        )
    first = choice.map(dict(zip(columns.values, (1.0, 0.0, *[0.5] * len(columns.values)), strict=False))).astype(float)
    return pd.DataFrame({0: first, 1: 1 - first})
