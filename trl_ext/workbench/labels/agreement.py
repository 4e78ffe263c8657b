"""Measure how far annotators agree, compare each annotator with the others, and list what labels cannot show."""

from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from ...upstream import need
from .outliers import mean_and_error, others_share, zscores
from .tables import FIRST, SECOND, TIE, Labels

RESAMPLES = 1000
_KAPPAS = 20  # annotators with the most labels, of whom each two are compared
_FEW = 20  # labels below which a z-score says little


def agreement_report(labels: Labels, seed: int = 0) -> dict[str, Any]:
    """
    Return how far annotators agree, as a dictionary that JSON can hold.

    Args:
        labels: the labels of all annotators.
        seed: seed of the bootstrap.

    Returns:
        A dictionary with these keys. A figure that is not known is None.

        - `labels`, `items`: how many labels there are, and how many items have a label.
        - `overlapping_items`: how many items have two labels or more.
        - `labels_per_item`: mean number of labels of an item.
        - `ties`: share of the labels that are ties.
        - `first`: share of the labels other than ties that chose the first answer of the item's first row.
        - `shown_first`: share of the labels other than ties that chose the answer shown first.
        - `alpha`, `alpha_interval`: Krippendorff's α for nominal data, and its 95 % interval.
        - `agreement`: share of pairs of labels of one item that are equal.
        - `coin`: how often someone who tosses a coin between the two answers would agree with the annotators.
        - `most_frequent`: how often someone who always gives the most frequent label would agree with the annotators.
        - `agreement_by_confidence`: how far labels below their annotator's median confidence agree with the others'
          labels, and how far labels at or above it do.
        - `missing`: how many cells have no label, or no annotator.
        - `repeats`, `contradictions`: how often annotators labelled an item again, and how often their labels of one
          item then differed.
        - `annotators`: a dictionary for each annotator, see [`per_annotator`].
        - `kappas`: Cohen's κ of each two who share an item, among the 20 annotators with the most labels.
        - `unknown`: sentences on what these labels cannot tell.
    """
    counts = labels.counts()
    per_item = counts.sum(1)
    overlapping = int((per_item > 1).sum())
    alpha, interval = krippendorff_alpha(counts, labels.prompt, seed=seed)
    compared = others_share(labels, counts, labels.choice)
    used = np.bincount(labels.choice, minlength=3)
    coin = ((counts[:, FIRST] + counts[:, SECOND]) / np.maximum(per_item, 1))[per_item > 1]
    people = per_annotator(labels, counts)
    report = {
        "labels": len(labels),
        "items": int((per_item > 0).sum()),
        "overlapping_items": overlapping,
        "labels_per_item": len(labels) / max(int((per_item > 0).sum()), 1),
        "ties": float(used[TIE] / max(len(labels), 1)),
        "first": _share(used[FIRST], used[FIRST] + used[SECOND]),
        "shown_first": _shown_first(labels),
        "alpha": alpha,
        "alpha_interval": interval,
        "agreement": _pair_agreement(counts),
        "coin": float(np.average(coin, weights=per_item[per_item > 1]) / 2) if overlapping else None,
        "most_frequent": float(np.nanmean(others_share(labels, counts, int(used.argmax())))) if overlapping else None,
        "agreement_by_confidence": _by_confidence(labels, compared),
        "missing": labels.missing,
        "repeats": int(labels.repeats.sum()),
        "contradictions": int(labels.contradictions.sum()),
        "annotators": people,
        "kappas": _kappas(labels),
    }
    return report | {"unknown": list(_unknown(labels, report))}


def krippendorff_alpha(
    counts: np.ndarray, groups: np.ndarray | None = None, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float | None, list[float] | None]:
    """
    Compute Krippendorff's α of nominal labels, and its 95 % percentile interval by a bootstrap over groups of items.

    Args:
        counts: (I, K), how often each item was given each label.
        groups: (I,) int, a number for each item; the bootstrap draws items with the same number together. Pairs of one
            prompt should be drawn together, since they share answers and so errors. By default each item is drawn
            alone.
        resamples: number of draws of the bootstrap.
        seed: seed of the bootstrap.

    Returns:
        α and its interval. α is 1 if annotators always agree, and 0 if they agree as often as by chance. Both are None
        where α is not defined: no item has two labels, or all labels of items with two or more are the same.
    """
    need("krippendorff", "Krippendorff's α")
    import krippendorff

    has_two = counts.sum(1) > 1
    groups = np.arange(len(counts)) if groups is None else groups
    group, counts = pd.factorize(groups[has_two])[0], counts[has_two]
    counts = counts[:, counts.any(0)]
    if not len(counts) or counts.shape[1] < 2:
        return None, None
    alpha = float(krippendorff.alpha(value_counts=counts, level_of_measurement="nominal"))
    # α depends on sums over items alone, so groups with equal sums are drawn as one kind: few numbers are drawn
    totals = counts.sum(1)
    observed = (totals**2 - (counts**2).sum(1)) / (totals - 1)
    added = np.stack([np.bincount(group, values) for values in (observed, *counts.T)], 1)
    kinds, times = np.unique(added.round(9), axis=0, return_counts=True)
    drawn = np.random.default_rng(seed).multinomial(len(added), times / len(added), size=resamples) @ kinds
    sums = drawn[:, 1:]  # (R, K) labels of each kind
    every = sums.sum(1)
    expected = (every**2 - (sums**2).sum(1)) / (every - 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        alphas = 1 - drawn[:, 0] / expected
    low, high = np.nanpercentile(alphas, [2.5, 97.5])
    return alpha, [float(low), float(high)]


def per_annotator(labels: Labels, counts: np.ndarray) -> list[dict[str, Any]]:
    """
    Describe each annotator who gave a label; the annotator with the most labels comes first.

    Returns:
        A dictionary for each annotator, with these keys. A figure that is not known is None.

        - `annotator`: the name.
        - `labels`, `share`: number of the annotator's labels, and their share of all labels.
        - `compared`: number of the annotator's labels of items that others labelled, too.
        - `agreement`: mean share of the others' labels of the same item that equal the annotator's.
        - `z`: z-score of the agreement, see [`zscores`].
        - `ties`: share of ties among the annotator's labels.
        - `shown_first`: share of the annotator's labels other than ties that chose the answer shown first.
        - `lean`, `lean_z`: how much more often the annotator chooses the answer shown first than others choose the
          same answer, and this difference in standard errors.
        - `seconds`, `confidence`: median time for a label, and mean confidence.
        - `drift`, `drift_z`: agreement in the later half of the annotator's labels minus agreement in the earlier
          half, and this difference in standard errors.
        - `repeats`: how often the annotator labelled an item again.
        - `contradictions`: for how many items the annotator's repeated labels differ.
    """
    size = len(labels.annotators)
    total = np.bincount(labels.annotator, minlength=size)
    compared = others_share(labels, counts, labels.choice)
    has = np.isfinite(compared)
    who, agrees = labels.annotator[has], compared[has]
    number = np.bincount(who, minlength=size)
    mean = np.bincount(who, agrees, size) / np.maximum(number, 1)
    z = zscores(labels)
    drift, drift_z = _drift(labels, compared)
    lean, lean_z = _lean(labels, counts)
    is_choice = labels.choice != TIE
    seconds = _medians(labels, labels.seconds)
    confidence = _medians(labels, labels.confidence, "mean")
    choices = np.bincount(labels.annotator, is_choice, size)
    first = np.bincount(labels.annotator, is_choice & _is_shown_first(labels), size)
    return [
        {
            "annotator": labels.annotators[place],
            "labels": int(total[place]),
            "share": float(total[place] / len(labels)),
            "compared": int(number[place]),
            "agreement": float(mean[place]) if number[place] else None,
            "z": _known(z[place]),
            "ties": float((total - choices)[place] / total[place]),
            "shown_first": _share(first[place], choices[place]),
            "lean": _known(lean[place]),
            "lean_z": _known(lean_z[place]),
            "seconds": _known(seconds[place]),
            "drift": _known(drift[place]),
            "drift_z": _known(drift_z[place]),
            "confidence": _known(confidence[place]),
            "repeats": int(labels.repeats[place]),
            "contradictions": int(labels.contradictions[place]),
        }
        for place in np.argsort(-total, kind="stable")
        if total[place]
    ]


def _pair_agreement(counts: np.ndarray) -> float | None:
    per_item = counts.sum(1)
    pairs = (per_item * (per_item - 1)).sum()
    return _share((counts * (counts - 1)).sum(), pairs)


def _is_shown_first(labels: Labels) -> np.ndarray:
    return labels.choice == np.where(labels.swapped, SECOND, FIRST)


def _shown_first(labels: Labels) -> float | None:
    is_choice = labels.choice != TIE
    return _share(_is_shown_first(labels)[is_choice].sum(), is_choice.sum())


def _lean(labels: Labels, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """
    Return how much more often each annotator chooses the answer shown first than others choose it, (A,), and the
    z-score of that difference, (A,).
    """
    size = len(labels.annotators)
    choices = counts[labels.item][:, [FIRST, SECOND]].astype(float)
    mine = labels.choice != TIE
    choices[mine, labels.choice[mine]] -= 1
    total = choices.sum(1)
    usable = mine & (total > 0)
    their_first = np.where(labels.swapped, choices[:, SECOND], choices[:, FIRST])[usable] / total[usable]
    who, prompt = labels.annotator[usable], labels.prompt[labels.item[usable]]
    mean, error = mean_and_error(who, prompt, _is_shown_first(labels)[usable] - their_first, size)
    with np.errstate(invalid="ignore", divide="ignore"):
        return mean, mean / error


def _drift(labels: Labels, compared: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """
    Return the agreement in the later half of each annotator's labels minus the agreement in the earlier half, (A,),
    and the z-score of that difference, (A,).
    """
    size = len(labels.annotators)
    nothing = np.full(size, np.nan)
    if labels.time is None:
        return nothing, nothing
    known = np.isfinite(compared) & np.isfinite(labels.time)
    who, agrees = labels.annotator[known], compared[known]
    order = np.lexsort((labels.time[known], who))
    who, agrees = who[order], agrees[order]
    number = np.bincount(who, minlength=size)
    starts = np.concatenate([[0], np.cumsum(number)[:-1]])
    later = np.arange(len(who)) - starts[who] >= number[who] // 2
    prompt = labels.prompt[labels.item[known]][order]
    halves = [mean_and_error(who[half], prompt[half], agrees[half], size) for half in (~later, later)]
    (earlier, earlier_error), (latter, latter_error) = halves
    drift = np.where(number >= 4, latter - earlier, np.nan)
    with np.errstate(invalid="ignore", divide="ignore"):
        return drift, drift / np.hypot(earlier_error, latter_error)


def _medians(labels: Labels, values: np.ndarray | None, how: str = "median") -> np.ndarray:
    if values is None:
        return np.full(len(labels.annotators), np.nan)
    found = pd.Series(values).groupby(labels.annotator).agg(how)
    return found.reindex(range(len(labels.annotators))).to_numpy()


def _by_confidence(labels: Labels, compared: np.ndarray) -> dict[str, float] | None:
    """Return the mean agreement of labels below, and of labels at or above, their annotator's median confidence."""
    if labels.confidence is None:
        return None
    sure = labels.confidence >= _medians(labels, labels.confidence)[labels.annotator]
    halves = {"below_own_median": ~sure & np.isfinite(labels.confidence), "at_or_above": sure}
    known = {name: compared[half & np.isfinite(compared)] for name, half in halves.items()}
    return {name: float(shares.mean()) for name, shares in known.items() if len(shares)} or None


def _kappas(labels: Labels) -> list[dict[str, Any]]:
    """Return Cohen's κ of each two annotators who share an item, among the 20 with the most labels."""
    need("sklearn", "Cohen's κ")
    from sklearn.metrics import cohen_kappa_score

    total = np.bincount(labels.annotator, minlength=len(labels.annotators))
    chosen = sorted(int(place) for place in np.argsort(-total, kind="stable")[:_KAPPAS] if total[place])
    table = np.full((len(chosen), len(labels.rows)), -1, np.int8)
    for row, place in enumerate(chosen):
        mine = labels.annotator == place
        table[row, labels.item[mine]] = labels.choice[mine]
    cells = np.array([(a, b) for a in range(3) for b in range(3)])
    found = []
    for i, j in combinations(range(len(chosen)), 2):
        both = (table[i] >= 0) & (table[j] >= 0)
        if not (items := int(both.sum())):
            continue
        weights = np.bincount(3 * table[i][both] + table[j][both], minlength=9)
        is_constant = any((weights.reshape(3, 3).sum(axis) > 0).sum() < 2 for axis in (0, 1))
        kappa = None if is_constant else float(cohen_kappa_score(*cells.T, sample_weight=weights))
        names = (labels.annotators[chosen[i]], labels.annotators[chosen[j]])
        found.append({"annotators": list(names), "items": items, "kappa": kappa})
    return found


def _unknown(labels: Labels, report: dict[str, Any]) -> Any:
    """Yield sentences on questions that these labels cannot answer."""
    people = len(report["annotators"])
    if not people:
        yield "Each label is contradicted by another one of the same annotator on the same pair, so no label is left."
        return
    compared = [row for row in report["annotators"] if row["compared"]]
    if people == 1:
        yield "There is one annotator, so agreement is not known: have a second one label a tenth of the items."
    elif not report["overlapping_items"]:
        yield "No item has labels of two annotators, so agreement is not known: give some items to several."
    elif len(compared) == 2:
        yield "Only two annotators share items: how far they agree is known, but not which of them is off."
    if report["ties"] == 1:
        yield "All labels are ties: there is no preference to learn, and α is not defined."
    elif report["alpha"] is None and report["overlapping_items"]:
        yield "All labels of items that several labelled are the same, so α is not defined."
    if people > 1 and compared and (few := sum(0 < row["compared"] < _FEW for row in compared)):
        yield f"{few} of {people} annotators have fewer than {_FEW} labels to compare: their z-scores say little."
    if alone := people - len(compared) if compared else 0:
        yield f"{alone} of {people} annotators share no item with others, so their agreement is not known."
    if not labels.swapped.any():
        yield (
            "Every pair was shown in only one order. So if all annotators lean to one side, it is not known whether "
            "the answers there are better: only who leans more than the others is known."
        )
    if labels.time is None:
        yield "The table has no column of times, so drift is not known."
    if labels.seconds is None:
        yield "The table has no column of seconds, so speed is not known."


def _share(part: Any, whole: Any) -> float | None:
    return float(part / whole) if whole else None


def _known(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
