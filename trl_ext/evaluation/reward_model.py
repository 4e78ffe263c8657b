"""How good a reward model is on pairs that it was not trained on."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .bootstrap import bootstrap_interval


def pairwise_accuracy(margins: Tensor) -> Tensor:
    """Share of pairs whose chosen answer scores higher; a tie counts one half.

    Args:
        margins: (…, N) score of the chosen answer minus score of the rejected one.

    Returns:
        (…,) in [0, 1].
    """
    return ((margins > 0).double() + (margins == 0).double() / 2).mean(-1)


def calibration_error(margins: Tensor, bins: int = 10) -> Tensor:
    """Expected calibration error of the Bradley-Terry probabilities (Naeini et al., 2015; Guo et al., 1706.04599).

    ECE = Σ_b n_b/N · |accuracy_b − confidence_b|, where the confidence of a pair is σ(|margin|), the probability that
    the model gives to the answer that it prefers, and the bins divide [½, 1] evenly.

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
    """Accuracy within bins of equally many pairs, sorted by how much longer the chosen answer is.

    A reward model that has learnt length is right where the chosen answer is the longer one, and wrong where it is the
    shorter one.

    Args:
        margins: (N,) score of the chosen answer minus score of the rejected one.
        length_gaps: (N,) tokens of the chosen answer minus tokens of the rejected one.
        bins: number of bins, fewer where gaps repeat so often that they fill several.

    Returns:
        For each bin: smallest and largest gap, number of pairs, accuracy.
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
    """Held-out accuracy, calibration and accuracy by length gap, with bootstrap intervals.

    Args:
        chosen, rejected: (N,) scores.
        length_gaps: (N,) tokens of the chosen answer minus tokens of the rejected one.
        level: of the intervals.
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
    """Histogram of the margins of held-out pairs, written to `path` as a PNG."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    axes.hist(margins.tolist(), bins=40, color="tab:blue")
    axes.axvline(0, color="black", linewidth=1)
    axes.set(xlabel="score(chosen) − score(rejected)", ylabel="pairs")
    axes.set_title(f"{len(margins)} held-out pairs, accuracy {pairwise_accuracy(margins).item():.1%}")
    figure.savefig(path, dpi=120)
    plt.close(figure)
