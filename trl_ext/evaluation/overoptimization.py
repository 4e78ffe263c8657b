"""Compute and fit the scaling law of reward model overoptimization (Gao et al., 2210.10760)."""

import torch
from torch import Tensor


def overoptimization_curve(distance: Tensor, alpha: float, beta: float) -> Tensor:
    """Return the gain in reward that the law predicts at a distance d from the initial policy.

    R(d) = d (α − β log d), with d = √KL and R(0) = 0 (Gao et al., 2210.10760, eq. 1). For α, β > 0 it peaks at
    d = exp(α/β − 1), where R = β d.

    Args:
        distance: (N,) d ≥ 0, √nats.
        alpha, beta: coefficients, reward per √nat.

    Returns:
        (N,), reward.
    """
    return alpha * distance - beta * torch.special.xlogy(distance, distance)


def fit_overoptimization(distance: Tensor, gain: Tensor) -> tuple[float, float]:
    """Fit the coefficients (α, β) of [`overoptimization_curve`], which is linear in both, by least squares.

    Args:
        distance: (N,) d = √KL ≥ 0, √nats. Points at d = 0 do not count, since the curve is 0 there.
        gain: (N,) reward minus the initial policy's reward.

    Raises:
        ValueError: the shapes differ or are not (N,), a value is not finite, a distance is negative, or there are
            fewer than two different distances above 0.
    """
    if distance.shape != gain.shape or distance.ndim != 1:
        raise ValueError(
            f"distance and gain must both be (N,), got {tuple(distance.shape)} and {tuple(gain.shape)}: give one gain "
            "for each distance"
        )
    distance, gain = distance.detach().double().cpu(), gain.detach().double().cpu()
    if not (distance.isfinite() & gain.isfinite() & (distance >= 0)).all():
        raise ValueError(
            f"distance must be finite and >= 0, gain finite, got {distance} and {gain}: leave out other points"
        )
    if len(distance[distance > 0].unique()) < 2:
        raise ValueError(f"two different distances above 0 are needed, got {distance}: measure more points")
    design = torch.stack([distance, -torch.special.xlogy(distance, distance)], dim=1)
    alpha, beta = torch.linalg.lstsq(design, gain[:, None], driver="gelsd").solution[:, 0].tolist()
    return alpha, beta
