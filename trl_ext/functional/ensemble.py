"""Combine an ensemble's scores into one: mean, median, worst case, or a lower score where the members disagree.

A row without a score of some member gets no score: that member's score may be the lowest, so the scores of the other
members alone could be too high.
"""

from typing import Literal

from torch import Tensor

from .shapes import check_shapes

Combine = Literal["mean", "median", "min", "uncertainty"]


def disagreement(scores: Tensor) -> Tensor:
    """Return the standard deviation of the members' scores on each row, √(Σ_i (s_i − mean)² / K).

    Args:
        scores: (K, B) of K members, any unit; NaN where a member gives none.

    Returns:
        (B,), in the unit of the scores: 0 for one member, NaN where a member gives none.

    Raises:
        ValueError: scores is not (K, B).
    """
    check_shapes(ndim=2, scores=scores)
    return (scores - scores.mean(0)).square().mean(0).sqrt()


def ensemble_score(scores: Tensor, combine: Combine, coef: float = 1.0) -> Tensor:
    """Combine the members' scores of each row into one (Coste et al., 2310.02743, section 3.2).

    With s_i the members' scores: "mean" Σ s_i / K; "median"; "min", the worst case (WCO); "uncertainty"
    mean − coef · std (UWO). The paper subtracts λ · std² instead, with λ in units of 1 / score. Here coef has no unit,
    so twice the scores give twice the result.

    Args:
        scores: (K, B) of K members, any unit; NaN where a member gives none.
        combine: "mean", "median", "min" or "uncertainty".
        coef: factor of the standard deviation in "uncertainty", without unit, >= 0.

    Returns:
        (B,), in the unit of the scores; NaN where a member gives none.

    Raises:
        ValueError: scores is not (K, B).
    """
    check_shapes(ndim=2, scores=scores)
    match combine:
        case "mean":
            return scores.mean(0)
        case "median":
            return scores.quantile(0.5, dim=0)  # `median` would take the lower one of the middle two
        case "min":
            return scores.amin(0)
        case "uncertainty":
            return scores.mean(0) - coef * disagreement(scores)
    raise ValueError(f"combine must be 'mean', 'median', 'min' or 'uncertainty', got {combine!r}")
