"""Compute figures from a judge's verdicts: the winner of each pair, agreement with people, and biases."""

from collections.abc import Hashable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
import torch

from ...evaluation import accuracy_interval
from ..labels import FIRST, SECOND, TIE, krippendorff_alpha

RESAMPLES = 1000
CODES = {"a": FIRST, "b": SECOND, "tie": TIE}


def choice_of(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[str, float]:
    """
    Return a pair's winner, and the share of the verdicts that are for the winner.

    An answer is the winner if the mean verdict is for it in both orders, shown first and shown second. Else the pair
    is a tie. A question without a verdict counts as a verdict of 0.5.

    Args:
        rows: the verdicts on a pair, each with `first`, the answer that was shown first, and `a_is_better`: name → how
            sure the judge is that answer a is better, 0 to 1; or None.
        name: name of a principle, or "overall".

    Returns:
        "a", "b" or "tie"; and the mean over both orders of the verdicts for the winner, 0.5 for a tie.
    """
    by_order: dict[str, list[float]] = {"a": [], "b": []}
    for row in rows:
        by_order[row["first"]].append((row["a_is_better"] or {}).get(name, 0.5))
    means = [fmean(values) for values in by_order.values()]
    for winner, shares in (("a", means), ("b", [1 - mean for mean in means])):
        if min(shares) > 0.5:
            return winner, fmean(shares)
    return "tie", 0.5


def cohen_kappa(counts: np.ndarray) -> np.ndarray:
    """
    Return Cohen's κ of (…, K, K) tables; NaN where κ is not defined.

    A table counts items: row by the label that one rater gave, column by the label that the other gave.
    """
    size = counts.sum((-1, -2))
    with np.errstate(invalid="ignore", divide="ignore"):
        observed = np.trace(counts, axis1=-2, axis2=-1) / size
        expected = (counts.sum(-1) * counts.sum(-2)).sum(-1) / size**2
        return np.where(expected < 1, (observed - expected) / (1 - expected), np.nan)


def agreement(
    ours: Sequence[str], theirs: Sequence[str], prompts: Sequence[Hashable], seed: int = 0
) -> dict[str, Any]:
    """
    Measure how far two raters agree who chose between the same pairs of answers.

    Args:
        ours, theirs: (N,) choices of each rater: "a", "b" or "tie".
        prompts: (N,) names of the prompts; pairs of one prompt are resampled together.
        seed: seed of the bootstraps.

    Returns:
        - `rows`: number of pairs.
        - `agreement`: share of equal choices.
        - `kappa`, `alpha`: Cohen's κ and Krippendorff's α; None if not defined.
        - `kappa_interval`, `alpha_interval`: their 95 % intervals, percentiles of a bootstrap over prompts.
    """
    pairs = np.array([(CODES[mine], CODES[other]) for mine, other in zip(ours, theirs, strict=True)])
    group = pd.factorize(np.array([str(prompt) for prompt in prompts], object))[0]
    cells = np.eye(9, dtype=int)[3 * pairs[:, 0] + pairs[:, 1]]
    sums = np.zeros((group.max() + 1, 9), int)
    np.add.at(sums, group, cells)
    kinds, times = np.unique(sums, axis=0, return_counts=True)
    kappa = float(cohen_kappa(sums.sum(0).reshape(3, 3)))
    drawn = np.random.default_rng(seed).multinomial(len(sums), times / len(sums), size=RESAMPLES) @ kinds
    ends = np.nanpercentile(cohen_kappa(drawn.reshape(-1, 3, 3)), [2.5, 97.5]).tolist() if np.isfinite(kappa) else None
    alpha, alpha_interval = krippendorff_alpha(np.eye(3, dtype=int)[pairs].sum(1), group, RESAMPLES, seed)
    return {
        "rows": len(pairs),
        "agreement": float((pairs[:, 0] == pairs[:, 1]).mean()),
        "kappa": kappa if np.isfinite(kappa) else None,
        "kappa_interval": ends,
        "alpha": alpha,
        "alpha_interval": alpha_interval,
    }


def share_with_interval(is_so: Sequence[bool], prompts: Sequence[Hashable]) -> dict[str, Any]:
    """Return the `share` of True, its 95 % `interval` (None for fewer than two prompts), and the values' `count`."""
    margins = torch.tensor([1.0 if each else -1.0 for each in is_so])
    interval = list(accuracy_interval(margins, prompts)) if len(set(prompts)) > 1 else None
    return {"share": fmean(map(float, is_so)) if is_so else None, "interval": interval, "count": len(is_so)}


def shown_first(rows: Sequence[Mapping[str, Any]], name: str, prompt_of: Mapping[str, Hashable]) -> dict[str, Any]:
    """
    Return how often the judge preferred the answer shown first, as [`share_with_interval`] does; ties do not count.

    As both orders of each pair are asked, the share is one half for a judge that ignores the order.
    """
    known = [(row, row["a_is_better"][name]) for row in rows if row["a_is_better"] and name in row["a_is_better"]]
    taken = [(row, (p > 0.5) == (row["first"] == "a")) for row, p in known if p != 0.5]
    return share_with_interval([is_first for _, is_first in taken], [prompt_of[row["key"]] for row, _ in taken])


def longer_wins(choices: Sequence[str], lengths: Sequence[tuple[int, int]], prompts: Sequence[Hashable]) -> dict:
    """
    Return how often the longer answer was chosen, as [`share_with_interval`] does.

    Ties, and pairs whose answers are of the same length, do not count.
    """
    known = [
        ((a > b) == (choice == "a"), prompt)
        for choice, (a, b), prompt in zip(choices, lengths, prompts, strict=True)
        if choice != "tie" and a != b
    ]
    return share_with_interval([longer for longer, _ in known], [prompt for _, prompt in known])


def noise(ours: Sequence[str], shares: Sequence[float], theirs: Sequence[str]) -> dict[str, float | None]:
    """
    Measure how often people chose a judge's winners, and how far to shrink its shares of verdicts towards one half.

    Pairs that the judge calls a tie do not count. Of the other n let k be those whose winner people chose, too, where
    a pair that people call a tie counts ½. Then accuracy = (k + ½)/(n + 1).

    If a share p of the verdicts is for the winner, the confidence in the winner is ½ + (p − ½)·shrink. With
    shrink = (2·accuracy − 1)/(2·mean p − 1), 0 if this is negative, the mean confidence in these n is the accuracy.

    Args:
        ours: (N,) the judge's choices.
        shares: (N,) share of the verdicts that are for the judge's choice.
        theirs: (N,) people's choices.

    Returns:
        `winners`, which is n; `accuracy` and `shrink`, None if n is 0.
    """
    rows = [row for row in zip(ours, shares, theirs, strict=True) if row[0] != "tie"]
    if not rows:
        return {"winners": 0, "accuracy": None, "shrink": None}
    right = sum(0.5 if said == "tie" else float(said == mine) for mine, _, said in rows)
    accuracy, mean = (right + 0.5) / (len(rows) + 1), fmean(share for _, share, _ in rows)
    return {"winners": len(rows), "accuracy": accuracy, "shrink": max(2 * accuracy - 1, 0) / (2 * mean - 1)}


def confidence(share: float, shrink: float) -> float:
    """Return the confidence in a winner, 0.5 to 1: the share of the verdicts for it, shrunk as [`noise`] defines."""
    return min(0.5 + (share - 0.5) * shrink, 1.0)


def spent(rows: Sequence[Mapping[str, Any]], price_input: float | None, price_output: float | None) -> dict[str, Any]:
    """Return `tokens_in`, `tokens_out` and `money`: what the answers in a journal's rows cost in total."""
    tokens = [sum(row.get("tokens", (0, 0))[place] for row in rows) for place in (0, 1)]
    return {
        "tokens_in": tokens[0],
        "tokens_out": tokens[1],
        "money": money(tokens[0], tokens[1], price_input, price_output),
    }


def money(tokens_in: int, tokens_out: int, price_input: float | None, price_output: float | None) -> float | None:
    """Return what tokens cost; prices are for a million tokens. Return None if a price is None."""
    if price_input is None or price_output is None:
        return None
    return (tokens_in * price_input + tokens_out * price_output) / 1e6
