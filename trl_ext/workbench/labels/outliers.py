"""Find annotators whose agreement is lower than chance and the usual differences between annotators explain."""

from typing import Any

import numpy as np

from .tables import Labels

_NO_MEASURE, _ROUNDS = -2, 10  # z-score below which an annotator is no measure for others; most rounds of finding them


def zscores(labels: Labels) -> np.ndarray:
    """
    Return how many standard deviations each annotator's agreement is above the median agreement of the others.

    z = (x − median) / √(σ²/n + τ²), where

    - x is the annotator's mean agreement with others' labels of the same items, and the median is the median of the
      other annotators' x;
    - σ²/n is the noise of the annotator's n labels. An annotator's labels of several pairs of one prompt may agree or
      differ together. So σ² is multiplied by Σ (Σ r)² / Σ r², at least 1, with r = a label's agreement − x. The inner
      sum is over the annotator's labels of one prompt, the outer one over prompts, the last one over all labels;
    - τ² is how far the others differ beyond their own noise: (1.4826·MAD)² − median(σ²/n), at least 0.

    So neither few labels nor the usual differences count against an annotator. Nobody is compared with
    annotators whose z is below −2: z is computed again without them, until nothing changes or until fewer than three
    annotators, or fewer than half of all, would be left.

    Args:
        labels: the labels of all annotators.

    Returns:
        (A,) z-scores; NaN where z is not known, as with fewer than three annotators.
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
    """Return all annotators' z-scores, measured against those for whom `is_measure`, (A,) bool, is True."""
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
    Return for each label which share of the labels that others gave its item equals `choice`, (L,).

    The share is NaN where nobody else labelled the item.

    Args:
        labels: the labels to compare.
        counts: (I, 3), how often the annotators to compare with gave each item each choice.
        choice: the choice to look for: one for all labels, or (L,).
        own: whether `counts` contain the label itself: one bool for all labels, or (L,) bool.
    """
    others = counts.sum(1)[labels.item] - own
    same = counts[labels.item, choice] - own * (labels.choice == choice)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(others > 0, same / others, np.nan)


def mean_and_error(
    who: np.ndarray, prompt: np.ndarray, values: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """
    Return the mean of each annotator's values, (A,), and the standard error of that mean, (A,), clustered by prompt.

    The error is √(G/(G − 1) · Σ_prompts (Σ r)²) / n, with r = value − mean, for n values of G prompts. With fewer than
    two prompts it is NaN.

    Args:
        who: (L,) int, the annotator of each value.
        prompt: (L,) int, the prompt of each value.
        values: (L,) the values.
        size: number A of annotators.
    """
    n = np.bincount(who, minlength=size)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.bincount(who, values, size) / n
        of, together = _sums_by_prompt(who, prompt, values - mean[who])
        groups = np.bincount(of, minlength=size).astype(float)
        groups[groups < 2] = np.nan  # else rounding decides between 0/0 and an infinite error, which gives z = 0
        return mean, np.sqrt(groups / (groups - 1) * np.bincount(of, together**2, size)) / n


def _sums_by_prompt(who: np.ndarray, prompt: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sum the values of each annotator and prompt; return two arrays: the annotator of each sum, and the sums."""
    size = int(prompt.max(initial=0)) + 1
    keys, group = np.unique(who.astype(np.int64) * size + prompt, return_inverse=True)
    return keys // size, np.bincount(group, values, len(keys))
