"""Measure how far annotators agree, and compare each annotator with the others."""

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import median_abs_deviation

from .tables import FIRST, SECOND, TIE, Labels

RESAMPLES = 1000
_KAPPAS = 20  # annotators with the most labels, of whom each two are compared
_NO_MEASURE, _ROUNDS = -2, 10  # z-score below which an annotator is no measure for others; most rounds of finding them


def agreement_report(labels: Labels, seed: int = 0) -> dict[str, Any]:
    """
    Return measures of how far annotators agree, as a dictionary for JSON.

    Args:
        labels: the labels of all annotators.
        seed: seed of the bootstrap.

    Returns:
        A dictionary with these keys. A figure that is not known is None.

        - `labels`, `items`: how many labels there are, and how many items have a label.
        - `overlapping_items`: how many items have two labels or more.
        - `ties`: share of the labels that are ties.
        - `shown_first`: share of the labels other than ties that chose the answer shown first.
        - `alpha`, `alpha_interval`: Krippendorff's α for nominal data, and its 95 % interval.
        - `agreement`: share of pairs of labels of one item that are equal.
        - `missing`, `repeats`, `contradictions`: see [`Labels`].
        - `annotators`: a dictionary for each annotator, see [`per_annotator`].
        - `kappas`: a dictionary for each two annotators who share an item, among the 20 with the most labels: their
          names (`annotators`), how many `items` they share, and Cohen's `kappa`.
        - `unknown`: sentences on questions that these labels cannot answer.
    """
    counts = labels.counts()
    alpha, interval = krippendorff_alpha(counts, labels.prompt, seed=seed)
    is_choice = labels.choice != TIE
    size = counts.sum(1)
    report = {
        "labels": len(labels),
        "items": int((size > 0).sum()),
        "overlapping_items": int((size > 1).sum()),
        "ties": _share((~is_choice).sum(), len(labels)),
        "shown_first": _share((labels.choice == _shown_first(labels)).sum(), is_choice.sum()),
        "alpha": alpha,
        "alpha_interval": interval,
        "agreement": _share((counts * (counts - 1)).sum(), (size * (size - 1)).sum()),
        "missing": labels.missing,
        "repeats": labels.repeats,
        "contradictions": labels.contradictions,
        "annotators": per_annotator(labels),
        "kappas": _kappas(labels),
    }
    return report | {"unknown": list(_unknown(labels, report))}


def krippendorff_alpha(
    counts: np.ndarray, groups: np.ndarray | None = None, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float | None, list[float] | None]:
    """
    Compute Krippendorff's α of nominal labels, and its 95 % percentile interval by a bootstrap over groups of items.

    α = 1 − observed/expected disagreement. Only items with two labels or more count. If they have n labels, n_k of
    kind k, the expected disagreement is (n² − Σ n_k²)/(n − 1). The observed disagreement is the same formula for each
    item's labels, summed over items.

    Args:
        counts: (I, K), how often each of I items was given each of K labels.
        groups: (I,) int, a number for each item; the bootstrap resamples items with the same number together. Pairs of
            one prompt should have the same number, since they share answers and so errors. By default each item is
            resampled alone.
        resamples: number of bootstrap samples.
        seed: seed of the bootstrap.

    Returns:
        α and its interval, [low, high]. α is 1 if annotators always agree, and 0 if they agree as often as by chance.
        Both are None where α is not defined: no item has two labels, or all labels of items with two or more are the
        same.
    """
    has_two = counts.sum(1) > 1
    if not has_two.any():
        return None, None
    group = (np.arange(len(counts)) if groups is None else groups)[has_two]
    counts = counts[has_two]
    sums = resampled(np.column_stack([_disagreement(counts), counts]), group, seed, resamples)
    with np.errstate(invalid="ignore", divide="ignore"):
        return with_interval(1 - sums[:, 0] / _disagreement(sums[:, 1:]))


def _disagreement(counts: np.ndarray) -> np.ndarray:
    size = counts.sum(1)
    return (size**2 - (counts**2).sum(1)) / (size - 1)


def cohen_kappa(counts: np.ndarray) -> np.ndarray:
    """
    Return Cohen's κ, (…), of each of the (…, K, K) tables `counts`; NaN where κ is not defined.

    A table counts items, by the label that one rater gave (row) and the label that the other gave (column).
    """
    size = counts.sum((-1, -2))
    with np.errstate(invalid="ignore", divide="ignore"):
        observed = np.trace(counts, axis1=-2, axis2=-1) / size
        expected = (counts.sum(-1) * counts.sum(-2)).sum(-1) / size**2
        return np.where(expected < 1, (observed - expected) / (1 - expected), np.nan)


def resampled(values: np.ndarray, groups: np.ndarray, seed: int, resamples: int = RESAMPLES) -> np.ndarray:
    """
    Return (1 + resamples, K) sums of (N, K) values: over all rows, then over each bootstrap sample of groups.

    `groups`, (N,), has the number of each row's group.
    """
    sums = pd.DataFrame(values).groupby(groups).sum().to_numpy()
    kinds, times = np.unique(sums.round(9), axis=0, return_counts=True)  # of equal groups only the number is drawn
    drawn = np.random.default_rng(seed).multinomial(len(sums), times / len(sums), size=resamples)
    return np.vstack([times, drawn]) @ kinds


def with_interval(statistic: np.ndarray) -> tuple[float | None, list[float] | None]:
    """
    Return a statistic over all rows, and its 95 % bootstrap interval, [low, high]; None and None if the statistic is
    not finite.

    Args:
        statistic: (1 + resamples,), computed from each row of what [`resampled`] returns: first over all rows, then
            over each bootstrap sample. Samples in which it is NaN do not count.
    """
    if not np.isfinite(statistic[0]):
        return None, None
    return float(statistic[0]), np.nanpercentile(statistic[1:], [2.5, 97.5]).tolist()


def per_annotator(labels: Labels) -> list[dict[str, Any]]:
    """
    Describe each annotator who gave a label; the annotator with the most labels comes first.

    Returns:
        A dictionary for each annotator, with these keys. A figure that is not known is None.

        - `annotator`: the name.
        - `labels`: number of the annotator's labels.
        - `compared`: number of the annotator's labels of items that others labelled, too.
        - `agreement`: mean share of the others' labels of the same item that equal the annotator's.
        - `z`: z-score of the agreement, see [`zscores`].
        - `ties`: share of ties among the annotator's labels.
        - `shown_first`: share of the annotator's labels other than ties that chose the answer shown first.
        - `lean`: how much more often the annotator chooses the answer shown first than others choose the same answer,
          as a difference of shares.
        - `lean_z`: `lean` ÷ its standard error.
    """
    counts = labels.counts()
    is_choice = labels.choice != TIE
    first = _shown_first(labels)
    took_first = np.where(is_choice, labels.choice == first, np.nan)
    table = pd.DataFrame(
        {
            "annotator": labels.annotator,
            "prompt": labels.prompt[labels.item],
            "agreement": _others_share(labels, counts, labels.choice),
            "ties": ~is_choice,
            "shown_first": took_first,
            "lean": took_first - _others_share(labels, counts * (np.arange(3) != TIE), first, is_choice),
        }
    )
    by = table.groupby("annotator")
    lean = table.groupby(["annotator", "prompt"])["lean"].mean().groupby("annotator")  # a prompt's labels err together
    z = zscores(labels)
    found = pd.DataFrame({"labels": by.size(), "compared": by["agreement"].count()})
    found = found.join(by[["agreement", "ties", "shown_first"]].mean())
    found = found.assign(z=z[found.index], lean=lean.mean(), lean_z=lean.mean() / lean.sem())
    found.insert(0, "annotator", [labels.annotators[place] for place in found.index])
    found = found.sort_values("labels", ascending=False, kind="stable").replace([np.inf, -np.inf], np.nan)
    return found.astype(object).where(found.notna(), None).to_dict("records")


def zscores(labels: Labels) -> np.ndarray:
    """
    Return how many standard deviations each annotator's agreement is above the median agreement of the others.

    z = (x − median) / √(σ²/n + τ²), where

    - x is the annotator's agreement with others' labels of the same items. It is a mean over n prompts, not items,
      since several pairs of one prompt may agree or differ together. The median is that of the other annotators' x;
    - σ²/n is the noise of n prompts, and σ² the variance over all prompts and annotators;
    - τ² is the variance of the other annotators' x beyond their noise: (1.4826·MAD)² − median(σ²/n), at least 0.

    So neither few labels nor the usual differences count against an annotator. Nobody is compared with annotators
    whose z is below −2. Without them z is computed again, until nothing changes, or until fewer than three annotators,
    or fewer than half of all, would be left to compare with.

    Args:
        labels: the labels of all annotators.

    Returns:
        (A,) z-scores; NaN where z is not known, as with fewer than three annotators.
    """
    z = np.full(len(labels.annotators), np.nan)
    people = np.unique(labels.annotator)
    is_measure = np.ones(len(z), bool)
    for _ in range(_ROUNDS):
        z = _zscores_against(labels, is_measure)
        now = ~(z < _NO_MEASURE)
        if (now == is_measure).all() or now[people].sum() < max(3, len(people) / 2):
            break
        is_measure = now
    return z


def _zscores_against(labels: Labels, is_measure: np.ndarray) -> np.ndarray:
    """Return all annotators' z-scores, (A,), each relative to the others for whom `is_measure`, (A,) bool, is True."""
    own = is_measure[labels.annotator]
    agrees = pd.Series(_others_share(labels, labels.where(own).counts(), labels.choice, own))
    agrees = agrees.groupby([labels.annotator, labels.prompt[labels.item]]).mean().dropna()
    by = agrees.groupby(level=0)
    mean = by.mean()
    noise = agrees.var(ddof=0) / by.size()
    z = np.full(len(is_measure), np.nan)
    for who in mean.index:
        others = mean.index[is_measure[mean.index] & (mean.index != who)]
        if len(others) < 2:
            continue
        spread = median_abs_deviation(mean[others], scale="normal") ** 2
        expected = np.sqrt(noise[who] + max(spread - noise[others].median(), 0))
        z[who] = (mean[who] - mean[others].median()) / expected if expected else 0.0
    return z


def _others_share(labels: Labels, counts: np.ndarray, choice: np.ndarray, own: Any = True) -> np.ndarray:
    """
    Return for each label, (L,), the share of the others' labels of its item that equal `choice`; NaN without others.

    Args:
        labels: the labels.
        counts: (I, 3), how often each item was labelled `FIRST`, `SECOND`, `TIE`, in the labels to compare with.
        choice: (L,) int, the choice to look for among the others' labels.
        own: (L,) bool, or one for all: whether `counts` includes the label itself, which then is subtracted.
    """
    others = counts.sum(1)[labels.item] - own
    same = counts[labels.item, choice] - own * (labels.choice == choice)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(others > 0, same / others, np.nan)


def _shown_first(labels: Labels) -> np.ndarray:
    return np.where(labels.swapped, SECOND, FIRST)


def _kappas(labels: Labels) -> list[dict[str, Any]]:
    """Return the entry `kappas` of [`agreement_report`]."""
    most = pd.Series(labels.annotator).value_counts().index[:_KAPPAS]
    kept = labels.where(np.isin(labels.annotator, most))
    table = pd.Series(kept.choice, [kept.item, kept.annotator]).unstack()  # (items, annotators)
    found = []
    for pair in combinations(sorted(most), 2):
        if len(both := table[[*pair]].dropna().to_numpy(int)):
            cells = np.bincount(both @ [3, 1], minlength=9).reshape(3, 3)
            kappa = float(cohen_kappa(cells))
            names = [labels.annotators[place] for place in pair]
            found.append({"annotators": names, "items": len(both), "kappa": kappa if kappa == kappa else None})
    return found


def _unknown(labels: Labels, report: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence for each question that the labels cannot answer. `report` has the labels' figures."""
    if report["alpha"] is None:
        yield "No item has two labels, or all labels of such items are the same, so α is not defined."
    if not labels.swapped.any():
        yield (
            "Every pair was shown in only one order. So if all annotators prefer the answer shown first, it is not "
            "known whether it is better; it is known only who prefers it more often than the others."
        )


def _share(part: Any, whole: Any) -> float | None:
    return float(part / whole) if whole else None
