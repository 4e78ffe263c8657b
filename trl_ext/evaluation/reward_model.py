"""Accuracy and calibration of a reward model on held-out pairs."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .bootstrap import bootstrap_interval


def pairwise_accuracy(margins: Tensor) -> Tensor:
    """Return the share of pairs whose chosen answer scores higher; a tie counts one half.

    Args:
        margins: (…, N) score of the chosen answer minus score of the rejected one.

    Returns:
        (…,) in [0, 1].
    """
    return ((margins > 0).double() + (margins == 0).double() / 2).mean(-1)


def calibration_error(margins: Tensor, bins: int = 10) -> Tensor:
    """Return the expected calibration error of the Bradley-Terry probabilities.

    ECE = Σ_b n_b/N · |accuracy_b − confidence_b| (Naeini et al., 2015; Guo et al., 1706.04599). The confidence of a
    pair is σ(|margin|), the model's probability of the answer that it prefers. The bins b divide [½, 1] evenly.

    Args:
        margins: (…, N) score of the chosen answer minus score of the rejected one.
        bins: number of bins.

    Returns:
        (…,) in [0, 1].
    """
    margins = margins.double()
    confidence = margins.abs().sigmoid()
    correct = (margins > 0).double() + (margins == 0).double() / 2
    bin_of = ((confidence - 0.5) * 2 * bins).long().clamp(max=bins - 1)
    gaps = torch.zeros(*margins.shape[:-1], bins, dtype=torch.double, device=margins.device)
    return gaps.scatter_add(-1, bin_of, correct - confidence).abs().sum(-1) / margins.shape[-1]


def accuracy_by_length_gap(margins: Tensor, length_gaps: Tensor, bins: int = 5) -> list[dict[str, float]]:
    """Return the accuracy in bins of equally many pairs, sorted by how much longer the chosen answer is.

    A reward model that has learnt length is right if the chosen answer is the longer one, and wrong if it is shorter.

    Args:
        margins: (N,) score of the chosen answer minus score of the rejected one.
        length_gaps: (N,) tokens of the chosen answer minus tokens of the rejected one.
        bins: number of bins. Fewer come back if one gap is so frequent that it fills several.

    Returns:
        For each bin the smallest and largest gap, the number of pairs and the accuracy.

    Raises:
        ValueError: shapes differ or are not (N,).
    """
    if margins.shape != length_gaps.shape or margins.ndim != 1:
        raise ValueError(
            f"margins and length_gaps must both be (N,), got {tuple(margins.shape)} and {tuple(length_gaps.shape)}: "
            "give one gap a pair"
        )
    edges = length_gaps.double().quantile(torch.linspace(0, 1, bins + 1, dtype=torch.double)[1:-1]).unique()
    bin_of = torch.bucketize(length_gaps.double(), edges)
    rows = []
    for index in bin_of.unique():
        members = bin_of == index
        gaps = length_gaps[members]
        accuracy = pairwise_accuracy(margins[members]).item()
        rows.append(
            {"from": gaps.min().item(), "to": gaps.max().item(), "pairs": int(members.sum()), "accuracy": accuracy}
        )
    return rows


def reward_model_report(chosen: Tensor, rejected: Tensor, length_gaps: Tensor, level: float = 0.95) -> dict[str, Any]:
    """Return accuracy and calibration error with bootstrap intervals, mean scores, and accuracy by length gap.

    Args:
        chosen, rejected: (N,) scores of the two answers of each pair.
        length_gaps: (N,) tokens of the chosen answer minus tokens of the rejected one.
        level: share of resamples within the intervals.
    """
    margins = (chosen - rejected).double()
    return {
        "pairs": len(margins),
        "accuracy": pairwise_accuracy(margins).item(),
        "accuracy_interval": bootstrap_interval(margins, pairwise_accuracy, level),
        "calibration_error": calibration_error(margins).item(),
        "calibration_error_interval": bootstrap_interval(margins, calibration_error, level),
        "margin_mean": margins.mean().item(),
        "margin_std": margins.std().item(),
        "chosen_mean": chosen.double().mean().item(),
        "rejected_mean": rejected.double().mean().item(),
        "accuracy_by_length_gap": accuracy_by_length_gap(margins, length_gaps),
    }


def plot_margins(margins: Tensor, path: str | Path) -> None:
    """Write a histogram of the margins of held-out pairs to `path`, as a PNG."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    axes.hist(margins.tolist(), bins=40, color="tab:blue")
    axes.axvline(0, color="black", linewidth=1)
    axes.set(xlabel="score(chosen) − score(rejected)", ylabel="pairs")
    axes.set_title(f"{len(margins)} held-out pairs, accuracy {pairwise_accuracy(margins).item():.1%}")
    figure.savefig(path, dpi=120)
    plt.close(figure)
