"""Measure whether the probabilities of a reward model are right, and fit the temperature that corrects them."""

import math
from typing import Any

import torch
from scipy.optimize import brentq
from torch import Tensor

from .reward_model import accuracy_of, calibration_error, confidence_bins


def fit_temperature(margins: Tensor, largest: float = 1e4) -> float | None:
    """Return the temperature T that makes the labels of the pairs most likely, where P(chosen wins) = σ(margin / T).

    The log-likelihood Σ log σ(β · margin) is concave in β = 1/T (Guo et al., 1706.04599), so that its maximum is where
    its slope Σ margin · σ(−β · margin) is 0. If T is above 1, the model is too sure of itself; if below 1, not sure
    enough.

    Args:
        margins: (N,) score of the chosen answer minus score of the rejected one.
        largest: largest T and 1/T that are tried, in units of the mean |margin|.

    Returns:
        The temperature; None if no T is the most likely: if the margins' mean is not above 0 (the model is no better
        than a coin), if no margin is negative (any smaller T makes the labels more likely), or if the most likely T
        is beyond `largest`.
    """
    margins = margins.detach().double().cpu()
    unit = margins.abs().mean().item()
    if not margins.sum() > 0 or not (margins < 0).any():
        return None
    scaled, end = margins / unit, math.log(largest)

    def slope(log_beta: float) -> float:
        return (scaled * (-math.exp(log_beta) * scaled).sigmoid()).sum().item()

    if slope(end) > 0 or slope(-end) < 0:
        return None
    return unit / math.exp(brentq(slope, -end, end))


def calibration_error_by_chance(margins: Tensor, bins: int = 10, draws: int = 1000, seed: int = 0) -> float:
    """Return the mean calibration error that a model with correct probabilities would show on pairs of these margins.

    A calibration error is a mean of absolute values, so on few pairs it is not near 0 even for a calibrated model
    (Bröcker and Smith, 2007). Only the part of a model's calibration error above the returned one is its fault.

    Args:
        margins: (N,) score of the chosen answer minus score of the rejected one; their signs are replaced by random
            ones.
        bins: number of bins, as for [`calibration_error`].
        draws: how often random signs are drawn.
        seed: seed of the signs.
    """
    margins, generator = margins.detach().double().cpu().abs(), torch.Generator().manual_seed(seed)
    errors = []
    for start in range(0, draws, most := max(2**22 // len(margins), 1)):
        shape = (min(most, draws - start), len(margins))
        is_right = torch.rand(shape, generator=generator, dtype=torch.double) < margins.sigmoid()
        errors.append(calibration_error(torch.where(is_right, margins, -margins), bins))
    return torch.cat(errors).mean().item()


def reliability_bins(margins: Tensor, bins: int = 10) -> list[dict[str, Any]]:
    """Return the points of a reliability diagram: the model's accuracy on the pairs of each bin of confidence.

    The bins are those of [`calibration_error`]: σ(|margin|) in even parts of [½, 1].

    Args:
        margins: (N,) score of the chosen answer minus score of the rejected one.
        bins: number of bins; those without a pair are left out.

    Returns:
        A dictionary for each bin: its bounds `from` and `to`, the mean `confidence` of its pairs, the number of
        `pairs`, the `accuracy`, and its Wilson interval `accuracy_interval`.
    """
    margins = margins.detach().double().cpu()
    confidence, bin_of = confidence_bins(margins, bins)
    rows = []
    for index in bin_of.unique().tolist():
        members = bin_of == index
        rows.append(
            {
                "from": 0.5 + index / (2 * bins),
                "to": 0.5 + (index + 1) / (2 * bins),
                "confidence": confidence[members].mean().item(),
                **accuracy_of(margins[members]),
            }
        )
    return rows
