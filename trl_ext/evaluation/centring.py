"""Centring the scores of a reward model whose head has no bias."""

import torch
from torch import Tensor


def centring_shift(reference: Tensor, everything: Tensor, ridge: float = 1e-3) -> Tensor:
    """Return the weights v of a linear head that scores reference answers 1 on average and varies least over all.

    Most sequence classifiers have a head w without a bias, which could take up the mean score m of the reference
    answers. The head w − m v scores them exactly 0 on average, and of all such heads it changes margins least:
    min vᵀCv subject to vᵀμ = 1 has the solution v = C⁻¹μ / (μᵀC⁻¹μ).

    Args:
        reference: (M, D) inputs of the head for reference answers; μ is their mean.
        everything: (N, D) inputs of the head for answers of all kinds; C is their covariance.
        ridge: added to C's diagonal, in units of the diagonal's mean. It matters if N is not much larger than D.

    Returns:
        (D,), float64.

    Raises:
        ValueError: the shapes are not (M, D) and (N, D).
    """
    if reference.ndim != 2 or everything.ndim != 2 or reference.shape[1] != everything.shape[1]:
        raise ValueError(
            f"reference and everything must be (M, D) and (N, D), got {tuple(reference.shape)} and "
            f"{tuple(everything.shape)}: pass one row an answer"
        )
    covariance = everything.detach().double().T.cov()
    covariance += ridge * covariance.diagonal().mean() * torch.eye(len(covariance), dtype=torch.double)
    mean = reference.detach().double().mean(0)
    shift = torch.linalg.solve(covariance, mean)
    return shift / (shift @ mean)
