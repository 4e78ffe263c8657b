"""Read tables of labels (long, wide or rankings), and make pairs to train and to test on."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pandas as pd
from datasets import Dataset

FIRST, SECOND, TIE = range(3)
Method = Literal["majority", "noisy_bt"]
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
        annotator: in a long table (a row for each label) or a ranking, the column of the annotator's name.
        choice: in a long table, the column of the choice.
        annotators: in a wide table (a row for each pair), one column for each annotator, which has the annotator's
            name and holds the choices. These columns replace `annotator` and `choice`.
        scores: one column of scores for each of `responses`, in the same order. They replace `choice`, and do not go
            with `annotators`. The answer with the higher score wins, equal scores are a tie, and an answer without a
            score is not compared.
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
        item: (L,) int, the labelled item, 0 to I − 1.
        annotator: (L,) int, who gave the label, as an index into `annotators`.
        choice: (L,) int, `FIRST`, `SECOND` or `TIE`, in the order of the answers in the item's first row.
        swapped: (L,) bool, whether the annotator was shown the answers in the reverse order of the item's first row.
        annotators: (A,) names.
        prompt: (I,) int, a number for the prompt; the same prompt has the same number.
        answers: (I, 2) int, a number for each answer; the same answer to the same prompt has the same number.
        cells: (I, 2) int, the position of the two answers in the table: row · number of response columns + column.
        missing: how many rows have no label, or no annotator; in a wide table, cells count as rows.
        repeats: how often an annotator labelled an item again. Equal labels count once.
        contradictions: how often an annotator's labels of one item differ; all these labels are left out.
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
        """Return the labels for which `kept`, (L,) bool, is True; items and annotators keep their numbers."""
        return replace(
            self, **{name: getattr(self, name)[kept] for name in ("item", "annotator", "choice", "swapped")}
        )

    def counts(self) -> np.ndarray:
        """Return how often each item was labelled `FIRST`, `SECOND`, `TIE`: (I, 3) int."""
        return np.bincount(self.item * 3 + self.choice, minlength=3 * len(self.cells)).reshape(-1, 3)


def read_labels(dataset: Dataset, columns: Columns | None = None) -> Labels:
    """
    Read a table of labels part by part, and keep only hashes of the texts.

    Args:
        dataset: the table.
        columns: which column holds what; by default, the columns that `Columns()` names.

    Raises:
        ValueError: a choice is not in `columns.values`, a score is not a number, or there is no label.
    """
    columns = columns or Columns()
    size = len(columns.responses)
    table = _hashed(dataset, columns)
    who, names = pd.factorize(_said(table[columns.annotator]))
    scores = _scores(table, columns)
    is_answer = (table[[*columns.responses]] != _EMPTY).to_numpy()
    known = scores.notna().to_numpy() & (who >= 0)[:, None] & is_answer
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
        raise ValueError(
            f"none of the table's {len(dataset)} rows says which of two different answers an annotator prefers: check "
            "the names of the columns of answers, annotators, and choices or scores"
        )
    both = pairs["answer"], pairs["answer_b"]
    items = pairs.groupby(["prompt", np.minimum(*both), np.maximum(*both)], sort=False)
    pairs["item"] = items.ngroup()
    pairs["swapped"] = pairs["answer"] != pairs.groupby("item")["answer"].transform("first")
    margin = (pairs["score"] - pairs["score_b"]) * np.where(pairs["swapped"], -1, 1)
    pairs["choice"] = np.select([margin > 0, margin < 0], [FIRST, SECOND], TIE)
    of_one = ["item", "annotator"]
    is_first = ~pairs.duplicated(of_one)
    choices = pairs.groupby(of_one)["choice"]
    differs = choices.transform("min") != choices.transform("max")
    items = pairs.drop_duplicates("item")
    kept = pairs[is_first & ~differs]
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
    """Return the table in long form, with a column `row` of row numbers, and with hashes in place of texts."""
    texts = [columns.prompt, *columns.responses]
    parts = []

    def text_of(value: Any) -> str:
        if isinstance(value, str):
            return value
        return json.dumps(value, sort_keys=True) if value else ""

    for batch in dataset.select_columns(list(dict.fromkeys(columns.names))).iter(_ROWS):
        part = pd.DataFrame(batch, dtype=object)
        for name in texts:
            values = np.array([*map(text_of, part[name])], object)
            part[name] = pd.util.hash_array(values, categorize=False)
        parts.append(part)
    table = pd.concat(parts, ignore_index=True).rename_axis("row").reset_index()
    if columns.annotators:
        table = table.melt(["row", *texts], [*columns.annotators], columns.annotator, columns.choice)
    return table


def _said(column: pd.Series) -> pd.Series:
    """
    Return names or choices as stripped text; 1.0 becomes "1", since a CSV column with gaps reads 1 as 1.0.
    """
    return column.convert_dtypes().astype("string").str.strip().replace("", pd.NA)


def _scores(table: pd.DataFrame, columns: Columns) -> pd.DataFrame:
    """
    Return the scores of each row's answers, a column for each answer; higher is better, so ranks are negated.

    A choice gives the chosen answer 1 and the other 0; a tie gives both ½.
    """
    if columns.scores:
        scores = table[[*columns.scores]].apply(pd.to_numeric) * (-1 if columns.lowest_wins else 1)
        return scores.set_axis(range(len(columns.responses)), axis=1)
    choice = _said(table[columns.choice])
    if len(unknown := choice[choice.notna() & ~choice.isin(columns.values)]):
        at = unknown.index[0]
        column = table[columns.annotator][at] if columns.annotators else columns.choice
        raise ValueError(
            f"the column {column!r} holds {unknown[at]!r} in row {table['row'][at]}, not one of "
            f"{', '.join(columns.values)}: set `--choice_values FIRST SECOND TIE` (in Python `Columns(values=…)`) to "
            "the values that mean the first answer, the second answer and a tie"
        )
    points = 1.0, 0.0, *[0.5] * len(columns.values)
    of_choice = dict(zip(columns.values, points, strict=False))
    first = choice.map(of_choice).astype(float)
    return pd.DataFrame({0: first, 1: 1 - first})


# ---- Pairs ----


def shares_of_labels(labels: Labels, method: Method = "majority") -> np.ndarray:
    """
    Return the probability that each of the three labels is the right one, for each item.

    - `"majority"` counts votes.
    - `"noisy_bt"` scores each answer by all its pairs, and takes the sigmoid of the difference of an item's two
      scores; a tie has probability 0. See [`noisy_bradley_terry`].

    Args:
        labels: labels of the annotators who count.
        method: how labels are aggregated.

    Returns:
        (I, 3) shares of `FIRST`, `SECOND` and `TIE`, which add up to 1, or are all 0 if the item has no label.
    """
    counts = labels.counts()
    if method == "majority":
        return counts / np.maximum(counts.sum(1, keepdims=True), 1)
    wins = np.array([1.0, 0.0, 0.5])[labels.choice]
    scores, _ = noisy_bradley_terry(labels.answers[labels.item], wins, labels.annotator, labels.answers.max() + 1)
    one, other = labels.answers.T
    first = 1 / (1 + np.exp(scores[other] - scores[one]))
    return np.column_stack([first, 1 - first, 0 * first]) * counts.any(1, keepdims=True)


def noisy_bradley_terry(
    answers: np.ndarray, first_wins: np.ndarray, annotator: np.ndarray, size: int, steps: int = 500
) -> tuple[np.ndarray, np.ndarray]:
    """
    Estimate scores of answers and the reliability of annotators together.

    P(annotator k prefers i to j) = η_k σ(s_i − s_j) + (1 − η_k) σ(s_j − s_i), with the sigmoid σ (Crowd-BT, Chen et
    al. 2013, "Pairwise ranking aggregation in a crowdsourced setting"). With η_k = 1 this is Bradley and Terry's
    model; an annotator with η_k = ½ chooses at random, and one with η_k = 0 always chooses the opposite. The priors
    are s ~ N(0, 1) and η ~ Beta(8, 2), with mean 0.8: most annotators are better than chance, which also fixes the
    scores' sign. L-BFGS, started at s = 0, finds the mode of the posterior.

    Args:
        answers: (L, 2) int, the two answers of each label, as numbers from 0 to R − 1.
        first_wins: (L,) 1 if the first answer is preferred, 0 if the second is, ½ for a tie, which counts as half a
            win of each.
        annotator: (L,) int, who gave each label, as numbers from 0 to A − 1.
        size: number R of answers.
        steps: largest number of steps of L-BFGS.

    Returns:
        (R,) scores s of the answers, and (A,) reliabilities η of the annotators, in (0, 1).
    """
    import torch  # takes seconds, and votes need none
    from scipy.optimize import minimize
    from scipy.special import expit

    one, other, who, wins = map(torch.tensor, (*answers.T.copy(), annotator, first_wins))

    def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        """Return −log p(labels, s, η) up to a constant, and its gradient with respect to s and the logits of η."""
        x = torch.tensor(parameters, requires_grad=True)
        scores = x[:size]
        logits = x[size:]
        p = torch.sigmoid(scores[one] - scores[other])
        trust = torch.sigmoid(logits)[who]
        q = (trust * p + (1 - trust) * (1 - p)).clamp(1e-12, 1 - 1e-12)
        likelihood = (wins * q.log() + (1 - wins) * (1 - q).log()).sum()
        log_eta, log_rest = (torch.nn.functional.logsigmoid(sign * logits) for sign in (1, -1))
        value = scores.square().sum() / 2 - likelihood - (7 * log_eta + log_rest).sum()
        value.backward()
        return value.item(), x.grad.numpy()  # type: ignore[union-attr]

    start = np.r_[np.zeros(size), np.full(annotator.max() + 1, np.log(8 / 2))]
    found = minimize(loss, start, method="L-BFGS-B", jac=True, options={"maxiter": steps}).x
    return found[:size], expit(found[size:])


def hold_out_annotators(labels: Labels, share: float = 0.2, seed: int = 0) -> tuple[Labels, Labels | None]:
    """
    Divide labels into training labels and test labels that have no annotator and no prompt in common.

    A share of the annotators is held out. A prompt is for testing if only held-out annotators labelled it, and for
    training if none of them did; each other prompt is for testing with the probability `share`. Held-out annotators'
    labels of training prompts are dropped, and so are other annotators' labels of test prompts.

    Args:
        labels: labels of the annotators who count.
        share: share of annotators to hold out, at least one and at most all but one; 0 holds out nobody.
        seed: seed of the random choice of annotators and prompts.

    Returns:
        The labels to train on, and the labels to test on. The latter are None if nobody is held out: `share` is 0, or
        there is only one annotator.
    """
    people = np.unique(labels.annotator)
    if share == 0 or len(people) < 2:
        return labels, None
    generator = np.random.default_rng(seed)
    number = min(max(1, round(share * len(people))), len(people) - 1)
    held = np.isin(labels.annotator, generator.permutation(people)[:number])
    prompt = labels.prompt[labels.item]
    prompts = int(labels.prompt.max()) + 1
    by_held, by_others = (np.bincount(prompt[mask], minlength=prompts) > 0 for mask in (held, ~held))
    is_test = by_held & (~by_others | (generator.random(prompts) < share))
    return labels.where(~held & ~is_test[prompt]), labels.where(held & is_test[prompt])


def majority_pairs(
    dataset: Dataset,
    labels: Labels,
    columns: Columns | None = None,
    *,
    shares: np.ndarray | None = None,
    confidence_bound: float = 0.6,
    min_labels: int = 1,
    keep_columns: Sequence[str] = (),
    left_out: dict[str, int] | None = None,
) -> Iterator[dict[str, Any]]:
    """
    Yield a preference pair for each item whose winner has a share of labels of at least `confidence_bound`.

    Pairs are in the order of the table. A pair is a dictionary with

    - `prompt`, `chosen` and `rejected`;
    - `confidence`: the share of the winner, which the setting `use_confidence` reads;
    - `weight`: a number proportional to 2·`confidence` − 1, and 1 on average, which the setting `use_weight` reads;
    - `votes`: the number of the item's labels;
    - `annotators`: the names of those who gave the labels.

    Args:
        dataset: the table that `labels` were read from.
        labels: the labels that count.
        columns: the columns that `labels` were read with.
        shares: shares from [`shares_of_labels`]; by default those of `"majority"`.
        confidence_bound: least share of the winner, in [0.5, 1]. An item whose winner has less, because of ties or of
            labels for the other answer, is left out.
        min_labels: least number of labels; an item with fewer is left out.
        keep_columns: further columns of the table to keep in the pair, with the values in the item's first row.
        left_out: a dictionary in which this function stores, by reason, how many items are left out.
    """
    columns = columns or Columns()
    shares = shares_of_labels(labels) if shares is None else shares
    votes = labels.counts().sum(1)
    confidence = shares[:, [FIRST, SECOND]].max(1)
    is_out = votes == 0
    left_out = {} if left_out is None else left_out
    for why, is_so in {
        "without a winner": shares[:, FIRST] == shares[:, SECOND],
        f"with a confidence below {confidence_bound:g}": confidence < confidence_bound - 1e-9,
        f"with fewer than {min_labels} labels": votes < min_labels,
    }.items():
        left_out[why] = int((is_so & ~is_out).sum())
        is_out |= is_so
    kept = np.flatnonzero(~is_out)
    weight = 2 * confidence[kept] - 1
    weight = weight / weight.mean() if weight.any() else np.ones(len(kept))
    annotators = np.array(labels.annotators, object)[labels.annotator]
    names = pd.Series(annotators).groupby(labels.item).agg(sorted)
    wanted = dataset.select_columns(list(dict.fromkeys([columns.prompt, *columns.responses, *keep_columns])))
    rows, places = np.divmod(labels.cells[kept], len(columns.responses))
    for item, weight_, one, other, place in zip(
        kept, weight, wanted.select(rows[:, 0]), wanted.select(rows[:, 1]), places, strict=True
    ):
        answers = [row[columns.responses[column]] for row, column in zip((one, other), place, strict=True)]
        if isinstance(one[columns.prompt], list):
            answers = [[{"role": "assistant", "content": a}] if isinstance(a, str) else a for a in answers]
        winner = int(shares[item, SECOND] > shares[item, FIRST])
        yield {
            **{name: one[name] for name in keep_columns},
            "prompt": one[columns.prompt],
            "chosen": answers[winner],
            "rejected": answers[1 - winner],
            "confidence": float(min(confidence[item], 1.0)),
            "weight": float(weight_),
            "votes": int(votes[item]),
            "annotators": names[item],
        }
