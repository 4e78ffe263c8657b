"""Combine an ensemble's scores into one: mean, median, worst case, or a lower score where the members disagree.

If any member gives a row no score, the row gets no combined score: the missing score might be the lowest, so combining
the others could give too high a score.
"""

from typing import Literal

from torch import Tensor

Combine = Literal["mean", "median", "min", "uncertainty"]


def disagreement(scores: Tensor) -> Tensor:
    """Return the standard deviation of the members' scores on each row, √(Σ_i (s_i − mean)² / K).

    Args:
        scores: (K, B), the scores of K members for B rows, any unit; NaN where a member gives no score.

    Returns:
        (B,), in the unit of the scores: 0 if K is 1, NaN for a row that any member gave no score.
    """
    return (scores - scores.mean(0)).square().mean(0).sqrt()


def ensemble_score(scores: Tensor, combine: Combine, coef: float = 1.0) -> Tensor:
    """Combine the members' scores of each row into one (Coste et al., 2310.02743, section 3.2).

    With the members' scores s_i on a row, `combine` gives:

    - "mean": Σ s_i / K
    - "median": the median; with an even K the mean of the two middle scores
    - "min": the lowest score, the worst case (WCO)
    - "uncertainty": mean − coef · std (UWO)

    For UWO the paper subtracts λ · std² instead, with λ in units of 1 / score. Here coef has no unit, so doubling all
    scores doubles the result.

    Args:
        scores: (K, B), the scores of K members for B rows, any unit; NaN where a member gives no score.
        combine: "mean", "median", "min" or "uncertainty".
        coef: factor of the standard deviation in "uncertainty", without unit, >= 0.

    Returns:
        (B,), in the unit of the scores; NaN for a row that any member gave no score.
    """
    match combine:
        case "mean":
            return scores.mean(0)
        case "median":
            return scores.quantile(0.5, dim=0)  # `median` would take the lower one of the middle two
        case "min":
            return scores.amin(0)
        case "uncertainty":
            return scores.mean(0) - coef * disagreement(scores)
