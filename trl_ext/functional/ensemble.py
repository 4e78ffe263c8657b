"""One score of an ensemble's: mean, median, worst case, or less where the members disagree.

Where a member says nothing, nobody knows how low it would have been: the others' score alone could be higher than that
of all. So such a row has none.
"""

from typing import Literal

from torch import Tensor

from .shapes import check_shapes

Combine = Literal["mean", "median", "min", "uncertainty"]


def disagreement(scores: Tensor) -> Tensor:
    """Return how far members disagree on each row: their standard deviation, √(Σ_i (s_i − mean)² / K).

    Args:
        scores: (K, B) of K members, any unit. NaN where a member says nothing.

    Returns:
        (B,), in the unit of the scores: 0 for one member, NaN where a member says nothing.

    Raises:
        ValueError: scores is not (K, B).
    """
    check_shapes(ndim=2, scores=scores)
    return (scores - scores.mean(0)).square().mean(0).sqrt()


def ensemble_score(scores: Tensor, combine: Combine, coef: float = 1.0) -> Tensor:
    """Return one score of each row (Coste et al., 2310.02743, section 3.2).

    With s_i the members' scores: "mean" Σ s_i / K; "median"; "min", the worst case (WCO); "uncertainty"
    mean − coef · std (UWO). The paper subtracts λ · std² instead, whose λ is in units of 1 / score: here twice the
    scores are twice the result.

    Args:
        scores: (K, B) of K members, any unit. NaN where a member says nothing.
        combine: how.
        coef: of "uncertainty", without unit, >= 0.

    Returns:
        (B,), in the unit of the scores; NaN where a member says nothing.

    Raises:
        ValueError: scores is not (K, B).
    """
    check_shapes(ndim=2, scores=scores)
    match combine:
        case "mean":
            return scores.mean(0)
        case "median":
            return scores.quantile(0.5, dim=0)  # of an even number the middle of two; `median` takes the lower
        case "min":
            return scores.amin(0)
        case "uncertainty":
            return scores.mean(0) - coef * disagreement(scores)
    raise ValueError(f"combine must be 'mean', 'median', 'min' or 'uncertainty', got {combine!r}")
