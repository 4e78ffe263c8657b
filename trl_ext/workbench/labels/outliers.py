"""Find annotators who agree with the others less than chance and usual differences explain."""

from typing import Any

import numpy as np

from .tables import Labels

_NO_MEASURE, _ROUNDS = -2, 10  # others are not measured against a lower z-score; rounds of finding such people


def zscores(labels: Labels) -> np.ndarray:
    """
    Compare each annotator's agreement with the median of the others', in standard deviations of what to expect.

    z = (x − median) / √(σ²/n + τ²), σ²/n being the noise of n labels, and τ² the spread among the others beyond their
    own noise: (1.4826·MAD)² − median(σ²/n), at least 0. Where one annotator labelled several pairs of a prompt, σ² is
    larger by how far these labels agree or differ together: Σ_prompts (Σ r)² / Σ r², with r = label − mean. So neither
    few labels nor usual differences count against anybody. People with z < −2 are no measure for the others: z is
    computed again without them until nothing changes, as long as three annotators and half of all are left.

    Args:
        labels: of all annotators.

    Returns:
        (A,); NaN where it is not known, as with fewer than three annotators.
    """
    size = len(labels.annotators)
    z, is_measure = np.full(size, np.nan), np.ones(size, bool)
    for _ in range(_ROUNDS):
        z = _zscores_against(labels, is_measure)
        now = ~(z < _NO_MEASURE)
        people = np.unique(labels.annotator)
        if (now == is_measure).all() or now[people].sum() < max(3, len(people) / 2):
            break
        is_measure = now
    return z


def _zscores_against(labels: Labels, is_measure: np.ndarray) -> np.ndarray:
    """Return z-scores against the annotators for whom the (A,) mask is True."""
    size = len(labels.annotators)
    own = is_measure[labels.annotator]
    agrees = others_share(labels, labels.where(own).counts(), labels.choice, own)
    known = np.isfinite(agrees)
    who, agrees = labels.annotator[known], agrees[known]
    number = np.bincount(who, minlength=size)
    mean = np.bincount(who, agrees, size) / np.maximum(number, 1)
    noise = np.zeros(size)
    if len(agrees):
        together = _sums_by_prompt(who, labels.prompt[labels.item[known]], agrees - mean[who])[1]
        alone = ((agrees - mean[who]) ** 2).sum()
        noise = agrees.var() * max(1.0, (together**2).sum() / alone if alone else 1.0) / np.maximum(number, 1)
    z = np.full(size, np.nan)
    measure = np.flatnonzero(is_measure & (number > 0))
    for place in np.flatnonzero(number):
        others = measure[measure != place]
        if len(others) < 2:
            continue
        median = np.median(mean[others])
        spread = (1.4826 * np.median(np.abs(mean[others] - median))) ** 2
        expected = np.sqrt(noise[place] + max(spread - np.median(noise[others]), 0))
        z[place] = (mean[place] - median) / expected if expected > 0 else 0.0
    return z


def others_share(labels: Labels, counts: np.ndarray, choice: Any, own: Any = True) -> np.ndarray:
    """
    Return for each label the share of other people's labels of the item that equal `choice`, (L,); NaN without any.

    Args:
        labels: the labels to compare.
        counts: (I, 3), how often each item was given each choice, by the people to compare with.
        choice: the choice to look for: one for all labels, or (L,).
        own: whether the counts contain the label itself: one bool for all labels, or (L,) bool.
    """
    others = counts.sum(1)[labels.item] - own
    same = counts[labels.item, choice] - own * (labels.choice == choice)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(others > 0, same / others, np.nan)


def mean_and_error(
    who: np.ndarray, prompt: np.ndarray, values: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """
    Return the mean of each annotator's (L,) values and its standard error clustered by prompt, (A,) each.

    The error is √(G/(G − 1) · Σ_prompts (Σ r)²) / n, with r = value − mean and G prompts; NaN where it is unknown.
    """
    n = np.bincount(who, minlength=size)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.bincount(who, values, size) / n
        of, together = _sums_by_prompt(who, prompt, values - mean[who])
        groups = np.bincount(of, minlength=size)
        return mean, np.sqrt(groups / (groups - 1) * np.bincount(of, together**2, size)) / n


def _sums_by_prompt(who: np.ndarray, prompt: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sum each annotator's values for each prompt; return whose each sum is, and the sums."""
    size = int(prompt.max(initial=0)) + 1
    keys, group = np.unique(who.astype(np.int64) * size + prompt, return_inverse=True)
    return keys // size, np.bincount(group, values, len(keys))
