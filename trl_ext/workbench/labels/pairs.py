"""Aggregate the labels of each item, and make pairs to train and to test on."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
from datasets import Dataset

from .tables import FIRST, SECOND, Columns, Labels

Method = Literal["majority", "noisy_bt"]
METHODS: tuple[str, ...] = get_args(Method)


def shares_of_labels(labels: Labels, method: Method = "majority") -> np.ndarray:
    """
    Return for each item how likely each of the three labels is the right one.

    - `"majority"` counts votes.
    - `"noisy_bt"` scores each answer from all its pairs, and returns σ of the difference of an item's two scores; ties
      get 0. See [`noisy_bradley_terry`].

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
    first = 1 / (1 + np.exp(scores[labels.answers[:, 1]] - scores[labels.answers[:, 0]]))
    return np.column_stack([first, 1 - first, 0 * first]) * counts.any(1, keepdims=True)


def noisy_bradley_terry(
    answers: np.ndarray, first_wins: np.ndarray, annotator: np.ndarray, size: int, steps: int = 500
) -> tuple[np.ndarray, np.ndarray]:
    """
    Estimate scores of answers and the reliability of annotators together.

    P(annotator k prefers i to j) = η_k σ(s_i − s_j) + (1 − η_k) σ(s_j − s_i) (Crowd-BT, Chen et al. 2013, "Pairwise
    ranking aggregation in a crowdsourced setting"). With η_k = 1 this is Bradley and Terry's model; an annotator with
    η_k = ½ tosses a coin, and one with η_k = 0 always says the opposite. The priors are s ~ N(0, 1) and
    η ~ Beta(8, 2), with mean 0.8: most annotators beat a coin, which also fixes the scores' sign. L-BFGS, started at
    s = 0, finds the mode of the posterior.

    Args:
        answers: (L, 2) int, the two answers of each label.
        first_wins: (L,) 1 if the first answer is preferred, 0 if the second is, ½ for a tie, which counts as half a
            win of each.
        annotator: (L,) int, who gave each label.
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
        """Return −log p(labels, s, η) up to a constant, and its gradient by s and the logits of η."""
        x = torch.tensor(parameters, requires_grad=True)
        scores, logits = x[:size], x[size:]
        p, trust = torch.sigmoid(scores[one] - scores[other]), torch.sigmoid(logits)[who]
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
        left_out: a dictionary to fill: why items are left out → how many.
    """
    columns = columns or Columns()
    shares = shares_of_labels(labels) if shares is None else shares
    votes, confidence = labels.counts().sum(1), shares[:, [FIRST, SECOND]].max(1)
    is_out, left_out = votes == 0, {} if left_out is None else left_out
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
    names = pd.Series(np.array(labels.annotators, object)[labels.annotator]).groupby(labels.item).agg(sorted)
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
