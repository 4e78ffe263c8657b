"""Compute means and variances that can be merged exactly, by Chan, Golub and LeVeque (1979), STAN-CS-79-773.

A "moments" tensor (..., 5) holds count, mean, M2 = sum of squared deviations from the mean, minimum, maximum. It is
float64 (float32 on devices without float64) and has no gradient. `merge_moments` merges the stacked moments of all
ranks.
"""

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
        (5,) moments: mean, minimum and maximum in the unit of values, M2 in that unit squared.
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
