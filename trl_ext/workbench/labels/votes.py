"""Aggregate the labels of each item, and make pairs to train and to test on."""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
from datasets import Dataset

from ...data import has_content, is_text
from ...upstream import need
from .bradley_terry import noisy_bradley_terry
from .columns import Columns, texts_of
from .tables import FIRST, SECOND, Labels

Method = Literal["majority", "dawid_skene", "mace", "noisy_bt"]
METHODS: tuple[str, ...] = get_args(Method)
_ENOUGH_PER_ITEM, _ENOUGH_EACH = 2, 10
_ROWS = 1000
_NO_TEXT = "with an empty text, or the same one twice"


def shares_of_labels(labels: Labels, method: Method = "majority") -> np.ndarray:
    """
    Return for each item how likely each of the three labels is the right one.

    - `"majority"` counts votes.
    - `"dawid_skene"` (1979, crowd-kit's) learns how often each annotator gives each label to items of each true label.
    - `"mace"` (Hovy et al. 2013, crowd-kit's) learns how often each annotator guesses.
    - `"noisy_bt"` scores each answer from all its pairs, and returns σ of the difference of an item's two scores; ties
      get 0. See [`noisy_bradley_terry`].

    Args:
        labels: labels of the annotators who count.
        method: how labels are aggregated.

    Returns:
        (I, 3) shares of `FIRST`, `SECOND` and `TIE`, which add up to 1, or are all 0 if the item has no label.

    Raises:
        ValueError: there are too few labels for a method other than `"majority"`: on average fewer than 2 an item (for
            `"noisy_bt"`, an answer), or fewer than 10 by the median annotator.
        ImportError: crowd-kit is not installed.
    """
    counts = labels.counts()
    if method == "majority":
        return counts / np.maximum(counts.sum(1, keepdims=True), 1)
    each = np.bincount(labels.annotator)
    answers = labels.responses[labels.item]
    is_scored = method == "noisy_bt"  # each label is of two answers
    known = len(np.unique(answers)) / 2 if is_scored else int(counts.any(1).sum())
    per_each = len(labels) / max(known, 1)
    if per_each < _ENOUGH_PER_ITEM or np.median(each[each > 0]) < _ENOUGH_EACH:
        raise ValueError(
            f"method {method} learns how good each annotator is: it needs {_ENOUGH_PER_ITEM} labels for "
            f"{'an answer' if is_scored else 'an item'} and {_ENOUGH_EACH} of the median annotator, got "
            f"{per_each:.2g} and {np.median(each[each > 0]):.0f}. Use the method majority"
        )
    if is_scored:
        wins = np.array([1.0, 0.0, 0.5])[labels.choice]
        scores, _ = noisy_bradley_terry(answers[:, 0], answers[:, 1], wins, labels.annotator)
        scores = np.append(scores, np.zeros(labels.responses.max() + 1 - len(scores)))  # of answers without a label
        first = 1 / (1 + np.exp(scores[labels.responses[:, 1]] - scores[labels.responses[:, 0]]))
        return np.stack([first, 1 - first, np.zeros(len(first))], 1) * counts.any(1, keepdims=True)
    need("crowdkit", f"method {method}")
    from crowdkit.aggregation import MACE, DawidSkene

    model = DawidSkene() if method == "dawid_skene" else MACE()
    table = pd.DataFrame({"task": labels.item, "worker": labels.annotator, "label": labels.choice})
    with warnings.catch_warnings():  # its warnings about pandas do not concern our caller
        warnings.simplefilter("ignore", DeprecationWarning)
        shares = model.fit_predict_proba(table).reindex(columns=range(3), fill_value=0.0)
    found = np.zeros(counts.shape)
    found[shares.index.to_numpy()] = shares.to_numpy()
    return found / np.maximum(found.sum(1, keepdims=True), 1e-300)


def hold_out_annotators(labels: Labels, share: float = 0.2, seed: int = 0) -> tuple[Labels, Labels | None]:
    """
    Divide labels into training labels and test labels that have no annotator and no prompt in common.

    A share of the annotators is held out. Prompts that only held-out annotators labelled are for the test, prompts
    that none of them labelled are for training, and of the other prompts the same share is for the test. A held-out
    annotator's labels of training prompts are dropped, and so are other annotators' labels of test prompts.

    Args:
        labels: labels of the annotators who count.
        share: share of annotators to hold out, rounded to one annotator at least; 0 holds out nobody.
        seed: seed of the draw.

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
    Yield a preference pair for each item whose winner is sure enough, in the order of the table.

    A pair is a dictionary with

    - `prompt`, `chosen` and `rejected`;
    - `confidence`: the share of the winner, which the setting `use_confidence` reads;
    - `weight`: a number proportional to 2·`confidence` − 1, and 1 on average, which the setting `use_weight` reads;
    - `votes`: the number of the item's labels;
    - `annotators`: the names of those who gave the labels;
    - `row`: the item's first row in the table.

    Args:
        dataset: the table that `labels` were read from.
        labels: the labels that count.
        columns: the columns that `labels` were read with.
        shares: shares from [`shares_of_labels`]; by default those of `"majority"`.
        confidence_bound: least share of the winner, in [0.5, 1]. An item whose winner has less, because of ties or of
            labels for the other answer, is left out.
        min_labels: least number of labels; an item with fewer is left out.
        keep_columns: further columns of the table to keep in the pair, with the values in the item's first row.
        left_out: a dictionary to fill: why items are left out → how many.

    Raises:
        ValueError: `confidence_bound` or `min_labels` is out of range.
    """
    if not 0.5 <= confidence_bound <= 1 or min_labels < 1:
        raise ValueError(
            f"confidence_bound must be in [0.5, 1] and min_labels 1 or more, got {confidence_bound} and {min_labels}"
        )
    columns = columns or Columns()
    shares = shares_of_labels(labels) if shares is None else shares
    number = labels.counts().sum(1)
    confidence = shares[:, [FIRST, SECOND]].max(1)
    is_known = number > 0
    has_winner = shares[:, FIRST] != shares[:, SECOND]
    is_sure = has_winner & (confidence >= confidence_bound - 1e-9)
    is_enough = is_known & is_sure & (number >= min_labels)
    kept = np.flatnonzero(is_enough & labels.usable)
    left_out = {} if left_out is None else left_out
    left_out |= {
        "without a winner": int((is_known & ~has_winner).sum()),
        f"with a confidence below {confidence_bound:g}": int((is_known & has_winner & ~is_sure).sum()),
        f"with fewer than {min_labels} labels": int((is_known & is_sure & (number < min_labels)).sum()),
        _NO_TEXT: int((is_enough & ~labels.usable).sum()),
    }
    weight = 2 * confidence[kept] - 1
    weight = weight / weight.mean() if weight.any() else np.ones(len(kept))
    by_item = np.argsort(labels.item, kind="stable")
    places = np.searchsorted(labels.item[by_item], [kept, kept + 1])
    names = np.array(labels.annotators, dtype=object)
    wanted = list(dict.fromkeys([*columns.prompt, *columns.responses, *keep_columns]))
    size, cells = len(columns.responses), labels.answers[kept]
    rows = _rows_of(dataset.select_columns(wanted).select(cells[:, 0] // size))
    # Where each row has one answer, the second one is in another row
    others = _rows_of(dataset.select_columns([*columns.responses]).select(cells[:, 1])) if size == 1 else None
    for place, row in enumerate(rows):
        item = kept[place]
        answers = [row[columns.responses[cells[place, 0] % size]]]
        answers.append((next(others) if others else row)[columns.responses[cells[place, 1] % size]])
        prompt, *answers = texts_of(row, answers, columns)
        if not (is_text(prompt) and prompt and all(map(has_content, answers)) and answers[0] != answers[1]):
            left_out[_NO_TEXT] += 1
            continue
        winner = int(shares[item, SECOND] > shares[item, FIRST])
        by = labels.annotator[by_item[places[0][place] : places[1][place]]]
        yield {
            **{name: row[name] for name in keep_columns},
            "prompt": prompt,
            "chosen": answers[winner],
            "rejected": answers[1 - winner],
            "confidence": float(min(confidence[item], 1.0)),
            "weight": float(weight[place]),
            "votes": int(number[item]),
            "annotators": sorted(names[by]),
            "row": int(labels.rows[item]),
        }


def _rows_of(dataset: Dataset) -> Iterator[dict[str, Any]]:
    for batch in dataset.iter(_ROWS):
        yield from (dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True))
