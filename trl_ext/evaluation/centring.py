"""Centring a reward model's scores without a bias to do it with."""

import torch
from torch import Tensor


def centring_shift(reference: Tensor, everything: Tensor, ridge: float = 1e-3) -> Tensor:
    """Weights v of a linear head that give 1 to the average reference answer and vary least over all answers.

    Most sequence classifiers have a head without a bias, so nothing can take up the mean score m of the reference
    answers. The head w − m v scores them 0 on average, exactly, and changes margins as little as any such head:
    min vᵀCv subject to vᵀμ = 1 has the solution v = C⁻¹μ / (μᵀC⁻¹μ).

    Args:
        reference: (M, D) what the head sees of each reference answer; μ is their mean.
        everything: (N, D) what the head sees of answers of all kinds; C is their covariance.
        ridge: added to C's diagonal, in units of its mean, for where N is not much larger than D.

    Returns:
        (D,) in float64.
    """
    if reference.ndim != 2 or everything.ndim != 2 or reference.shape[1] != everything.shape[1]:
        raise ValueError(
            f"reference and everything must be (M, D) and (N, D), got {tuple(reference.shape)} and "
            f"{tuple(everything.shape)}: one row an answer"
        )
    covariance = everything.detach().double().T.cov()
    covariance += ridge * covariance.diagonal().mean() * torch.eye(len(covariance), dtype=torch.double)
    mean = reference.detach().double().mean(0)
    shift = torch.linalg.solve(covariance, mean)
    return shift / (shift @ mean)
