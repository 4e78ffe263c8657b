"""Compute means and variances that can be merged exactly, combine an ensemble's scores, and test means at every log.

A "moments" tensor (..., 5) holds count, mean, M2 = sum of squared deviations from the mean, minimum, maximum (Chan,
Golub and LeVeque 1979, STAN-CS-79-773). It is float64 (float32 on devices without float64) and has no gradient.
`merge_moments` merges the stacked moments of all ranks.

If any member of an ensemble gives a row no score, the row gets no combined score: the missing score might be the
lowest, so combining the others could give too high a score.

The tests at every log share one level, which bounds the probability that any of them raises a false alarm.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from .masking import check_shapes


def _moments_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def empty_moments(device: torch.device | str | None = None) -> Tensor:
    """Return the moments of an empty set, (count, mean, M2, min, max) = (0, 0, 0, +inf, -inf).

    Merged with other moments, they change nothing.

    Args:
        device: device of the result; None is torch's default device.

    Returns:
        (5,) moments.
    """
    device = torch.get_default_device() if device is None else torch.device(device)
    return torch.tensor([0.0, 0.0, 0.0, torch.inf, -torch.inf], dtype=_moments_dtype(device), device=device)


def moments(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute the moments of the entries where mask is 1, in two passes: mean = sum x / n, M2 = sum (x - mean)^2.

    Args:
        values: any shape, any unit.
        mask: the shape of values, 1 = real; None takes all.

    Returns:
        (5,): count, mean, M2, minimum and maximum, in this order. Mean, minimum and maximum are in the unit of values,
        M2 in that unit squared. Without any entry count, mean and M2 are 0, the minimum ∞ and the maximum −∞.
    """
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask.bool()
    check_shapes(values=values, mask=mask)
    if values.numel() == 0:
        return empty_moments(values.device)
    values = values.detach().to(_moments_dtype(values.device))
    count = mask.sum().to(values.dtype)
    mean = torch.where(mask, values, 0.0).sum() / count.clamp(min=1)
    m2 = torch.where(mask, values - mean, 0.0).square().sum()
    minimum = torch.where(mask, values, torch.inf).amin()
    maximum = torch.where(mask, values, -torch.inf).amax()
    return torch.stack([count, mean, m2, minimum, maximum])


def merge_moments(stacked: Tensor) -> Tensor:
    """Merge the moments of N disjoint parts into the moments of the whole.

    n = sum n_i, mean = sum n_i mean_i / n, M2 = sum M2_i + sum n_i (mean_i - mean)^2 (Chan et al. 1979, for N parts).

    Args:
        stacked: (N, 5) moments, N >= 1, in any order. Empty parts change nothing.

    Returns:
        (5,) moments.
    """
    counts, means, m2s, minima, maxima = stacked.unbind(dim=-1)
    count = counts.sum()
    # Deviations from the largest part's mean avoid cancellation, and leave a single part as it is, bit for bit
    origin = means.take(counts.argmax())
    mean = origin + (counts * (means - origin)).sum() / count.clamp(min=1)
    m2 = m2s.sum() + (counts * (means - mean).square()).sum()
    return torch.stack([count, mean, m2, minima.amin(), maxima.amax()])


def variance(moments: Tensor, unbiased: bool = True) -> Tensor:
    """Return the variance: M2 / (n - 1) if unbiased, else M2 / n; 0 where n < 2.

    Args:
        moments: (..., 5) moments.
        unbiased: True divides by n - 1 (Bessel), False by n.

    Returns:
        (...), in the squared unit of the values.
    """
    count = moments[..., 0]
    m2 = moments[..., 2]
    return torch.where(count < 2, 0.0, m2 / (count - int(unbiased)))


def standard_deviation(moments: Tensor, unbiased: bool = True) -> Tensor:
    """Return the standard deviation sqrt(variance); 0 where n < 2.

    Args:
        moments: (..., 5) moments.
        unbiased: True divides by n - 1 (Bessel), False by n.

    Returns:
        (...), in the unit of the values.
    """
    return variance(moments, unbiased).sqrt()


def whitening_scale(moments: Tensor, eps: float = 1e-8) -> Tensor:
    """Return the factor that [`whiten`] multiplies by: 1 / sqrt(var + eps) with the unbiased variance; 1 where n < 2.

    Args:
        moments: (..., 5) moments.
        eps: added to the variance, in the squared unit of the values.

    Returns:
        (...), in the inverse unit of the values.
    """
    return torch.where(moments[..., 0] < 2, 1.0, torch.rsqrt(variance(moments) + eps))


def whiten(values: Tensor, mask: Tensor, moments: Tensor, shift_mean: bool = True, eps: float = 1e-8) -> Tensor:
    """Whiten the real tokens with given moments: (x - mean) / sqrt(var + eps), var unbiased; 0 under the mask.

    As in TRL 1.12's `masked_whiten`, shift_mean=False adds the mean back (for rewards), shift_mean=True does not (for
    advantages); arXiv:2403.17031. With n < 2 the spread is unknown, so x - mean is not scaled.

    Args:
        values: (B, T) or any shape, any unit.
        mask: the shape of values, 1 = real token.
        moments: (5,) moments of the real tokens of all ranks.
        shift_mean: True gives mean 0, False keeps the mean.
        eps: added to the variance, in the squared unit of the values.

    Returns:
        The shape and dtype of values.
    """
    check_shapes(values=values, mask=mask)
    mean = moments[1]
    whitened = (values.to(moments.dtype) - mean) * whitening_scale(moments, eps)
    if not shift_mean:
        whitened = whitened + mean
    return torch.where(mask.bool(), whitened, 0.0).to(values.dtype)


def explained_variance(residual_moments: Tensor, return_moments: Tensor) -> Tensor:
    """Return the share of the returns' variance that the values explain: 1 - Var(returns - values) / Var(returns).

    It is 1 for a perfect critic, 0 for a critic that predicts a constant, and below 0 for a critic that is worse than
    a constant.

    Args:
        residual_moments: (..., 5) moments of returns - values.
        return_moments: (..., 5) moments of the returns of the same tokens.

    Returns:
        (...), dimensionless; NaN where Var(returns) = 0.
    """
    check_shapes(residual_moments=residual_moments, return_moments=return_moments)
    return_variance = variance(return_moments)
    return torch.where(return_variance == 0, torch.nan, 1 - variance(residual_moments) / return_variance)


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


def spent_level(look: int, alpha: float) -> float:
    """Return the significance level of the k-th test on growing data: alpha_k = 6 alpha / (pi^2 k^2).

    Each test is a look at the data so far. The levels of all looks add up to alpha. So, by the union bound, the
    probability that any look errs is at most alpha, however many looks there are and whenever one stops (as in Shin,
    Ramdas and Rinaldo 2022, 2203.03532, for changes at an unknown time).

    Args:
        look: k, the number of the look, from 1.
        alpha: probability that any look errs, in (0, 1).

    Returns:
        alpha_k: this look errs with at most this probability.
    """
    return 6 * alpha / (math.pi * look) ** 2


def student_quantile(tail: float, dof: float) -> float:
    """Return t with P(T > t) = tail for a Student-distributed T; T is normal for infinite degrees of freedom.

    Args:
        tail: probability, in (0, 0.5).
        dof: degrees of freedom, above 0; may be fractional.

    Returns:
        t, in standard errors.
    """
    import scipy.special  # here, since it takes half a second

    return -float(scipy.special.stdtrit(dof, tail))


def scatter(squared_steps: float, count: int) -> tuple[float, float]:
    """Estimate the variance of single values from successive differences: sum (x_i+1 - x_i)^2 / (2 (n - 1)).

    A slow drift of the values' mean adds little to this estimate (von Neumann, Kent, Bellinson and Hart 1941). Its
    degrees of freedom, 2 (n - 1)^2 / (3 n - 4), come from fitting a scaled chi-squared distribution to the estimate's
    mean and variance.

    Args:
        squared_steps: sum of the squared differences of successive values, in the squared unit of the values.
        count: n, the number of values.

    Returns:
        The variance, in the squared unit of the values, infinity where n < 2; and its degrees of freedom.
    """
    if count < 2:
        return math.inf, 1.0
    return squared_steps / (2 * (count - 1)), 2 * (count - 1) ** 2 / (3 * count - 4)


def share_error(share: float, count: float) -> float:
    """Return the standard error of a mean of n values in [0, 1]: sqrt(q (1 - q) / n), q = (n p + 2) / (n + 4).

    No variable in [0, 1] with mean p has more variance than p (1 - p) (Bhatia and Davis 2000). q is the mean after two
    values of 1 and two of 0 are added to the n values, so that the error is above 0 even where p is 0 or 1 (Agresti
    and Coull 1998).

    Args:
        share: p, the mean of the values.
        count: n, the number of values, above 0.

    Returns:
        The standard error of the mean.
    """
    centre = (count * min(max(share, 0.0), 1.0) + 2) / (count + 4)
    return math.sqrt(centre * (1 - centre) / count)


def unexplained_error(count: float) -> float:
    """Return an upper bound on the standard error of log(1 - explained variance): 2 / sqrt(n - 1).

    1 - explained variance is the ratio Var(residuals) / Var(returns). The logarithm of the sample variance of n normal
    values has a variance of 2 / (n - 1). The logarithm of the ratio has at most twice that variance, if the logarithms
    of numerator and denominator are not negatively correlated.

    Args:
        count: n, the number of independent values: count completions, not tokens, since the tokens of one completion
            depend on each other.

    Returns:
        The bound on the standard error of the logarithm; infinity where n < 2.
    """
    return 2 / math.sqrt(count - 1) if count > 1 else math.inf
