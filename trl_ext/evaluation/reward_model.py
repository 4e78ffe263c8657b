"""Measure the accuracy and calibration of a reward model on held-out pairs."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from pathlib import Path
from statistics import NormalDist
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
    return credit(margins).mean(-1)


def credit(margins: Tensor) -> Tensor:
    """Return for each pair 1 if the chosen answer scores higher, one half for a tie, else 0; float64."""
    return (margins > 0).double() + (margins == 0).double() / 2


def wilson_interval(share: float, count: float, level: float = 0.95) -> tuple[float, float]:
    """Return Wilson's confidence interval of a share (1927), which is valid for few rows and for shares of 0 and 1.

    With z the normal quantile, its bounds are (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n).

    Args:
        share: p, in [0, 1].
        count: n, the number of rows.
        level: probability that the interval contains the true share.
    """
    z = NormalDist().inv_cdf((1 + level) / 2)
    middle, half = share + z * z / (2 * count), z * (share * (1 - share) / count + (z / (2 * count)) ** 2) ** 0.5
    scale = 1 + z * z / count
    return max((middle - half) / scale, 0.0), min((middle + half) / scale, 1.0)


def accuracy_interval(
    margins: Tensor, prompts: Sequence[Hashable], level: float = 0.95, few: int = 30
) -> tuple[float, float]:
    """Return a confidence interval of the accuracy, by resampling prompts, each with all of its pairs.

    Pairs that share a prompt, such as those of a ranking, are not independent. So prompts are resampled, not pairs (a
    bootstrap of clusters). With few prompts a bootstrap says too little, so Wilson's interval is returned, for as many
    rows as there are prompts.

    Args:
        margins: (N,) score of the chosen answer minus score of the rejected one.
        prompts: for each pair, what identifies its prompt, such as its text.
        level: share of resamples within the interval.
        few: number of prompts below which the interval is Wilson's.
    """
    sums: dict[Hashable, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for prompt, right in zip(prompts, credit(margins).tolist(), strict=True):
        sums[prompt][0] += right
        sums[prompt][1] += 1.0
    table = torch.tensor(list(sums.values()), dtype=torch.double)
    if len(table) < few:
        return wilson_interval(pairwise_accuracy(margins).item(), len(table), level)
    return bootstrap_interval(table, lambda drawn: drawn[..., 0].sum(1) / drawn[..., 1].sum(1), level)


def accuracy_by_group(margins: Tensor, groups: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the accuracy for each value in a column of the data, the value with most pairs first.

    Args:
        margins: (N,) score of the chosen answer minus score of the rejected one.
        groups: the column's value for each pair. If this is a list, such as of annotators, the pair counts for each
            item.

    Returns:
        A dictionary for each value: the `value`, its number of `pairs`, their `accuracy`, and the accuracy's Wilson
        interval `accuracy_interval`.

    Raises:
        ValueError: there are not as many values as margins.
    """
    if len(margins) != len(groups):
        raise ValueError(f"got {len(margins)} margins and {len(groups)} rows of a column: give one row for each pair")
    of: dict[str, list[float]] = defaultdict(list)
    for margin, value in zip(margins.tolist(), groups, strict=True):
        for each in dict.fromkeys(map(str, value if isinstance(value, (list, tuple)) else [value])):
            of[each].append(margin)
    largest_first = sorted(of.items(), key=lambda item: (-len(item[1]), item[0]))
    return [
        {"value": value, **accuracy_of(torch.tensor(members, dtype=torch.double))} for value, members in largest_first
    ]


def confidence_bins(margins: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """Return each pair's confidence σ(|margin|), and the index of the bin that it lies in; both are (…, N).

    Args:
        margins: (…, N) float64.
        bins: number of bins, which divide [½, 1] evenly.
    """
    confidence = margins.abs().sigmoid()
    return confidence, ((confidence - 0.5) * 2 * bins).long().clamp(max=bins - 1)


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
    confidence, bin_of = confidence_bins(margins, bins)
    gaps = torch.zeros(*margins.shape[:-1], bins, dtype=torch.double, device=margins.device)
    return gaps.scatter_add(-1, bin_of, credit(margins) - confidence).abs().sum(-1) / margins.shape[-1]


def accuracy_by_length_gap(margins: Tensor, length_gaps: Tensor, bins: int = 5) -> list[dict[str, Any]]:
    """Divide pairs by how much longer the chosen answer is into bins of about equal size; return each bin's accuracy.

    A reward model that has learnt length is right if the chosen answer is the longer one, and wrong if it is shorter.

    Args:
        margins: (N,) score of the chosen answer minus score of the rejected one.
        length_gaps: (N,) tokens of the chosen answer minus tokens of the rejected one.
        bins: number of bins. Fewer are returned if one gap is so frequent that it fills several.

    Returns:
        A dictionary for each bin: its smallest gap `from` and largest gap `to`, the number of `pairs`, the `accuracy`,
        and its Wilson interval `accuracy_interval`.

    Raises:
        ValueError: shapes differ or are not (N,).
    """
    if margins.shape != length_gaps.shape or margins.ndim != 1:
        raise ValueError(
            f"margins and length_gaps must both be (N,), got {tuple(margins.shape)} and {tuple(length_gaps.shape)}: "
            "give one gap for each pair"
        )
    edges = length_gaps.double().quantile(torch.linspace(0, 1, bins + 1, dtype=torch.double)[1:-1]).unique()
    bin_of = torch.bucketize(length_gaps.double(), edges)
    rows = []
    for index in bin_of.unique():
        members = bin_of == index
        gaps = length_gaps[members]
        rows.append({"from": gaps.min().item(), "to": gaps.max().item(), **accuracy_of(margins[members])})
    return rows


def accuracy_of(margins: Tensor) -> dict[str, Any]:
    """Return the number of `pairs`, their `accuracy`, and its Wilson interval `accuracy_interval`."""
    accuracy, pairs = pairwise_accuracy(margins).item(), len(margins)
    return {"pairs": pairs, "accuracy": accuracy, "accuracy_interval": wilson_interval(accuracy, pairs)}


def length_bias(
    margins: Tensor, length_gaps: Tensor, prompts: Sequence[Hashable], level: float = 0.95, least_prompts: int = 20
) -> dict[str, Any]:
    """Return how much more often a reward model is right where the chosen answer is longer than where it is shorter.

    The bias is a − b: the model's accuracy a on pairs whose chosen answer is the longer one, minus its accuracy b on
    pairs whose chosen answer is the shorter one. If the longer answer is chosen in half of the pairs, the model
    prefers the longer answer in (a + 1 − b)/2 of the pairs: in 60 % with a bias of +0.2, in 50 % with a bias of 0, and
    in 40 % with a bias of −0.2.

    Args:
        margins: (N,) score of the chosen answer minus score of the rejected one.
        length_gaps: (N,) tokens of the chosen answer minus tokens of the rejected one.
        prompts: for each pair, what identifies its prompt. Prompts are resampled, see [`accuracy_interval`].
        level: share of resamples within the intervals.
        least_prompts: number of prompts with a longer chosen answer, and with a shorter one, without which the bias
            is not computed.

    Returns:
        A dictionary with the keys

        - `bias`, in [−1, 1], and its `interval`; both None if a side has fewer prompts than `least_prompts`;
        - `longer` and `shorter`: for the pairs whose chosen answer is longer, and for those where it is shorter, the
          number of `pairs` and of `prompts`, the `accuracy` and its `accuracy_interval` (both None without pairs).
    """
    found: dict[str, Any] = {"bias": None, "interval": None}
    sides = {"longer": length_gaps > 0, "shorter": length_gaps < 0}
    for name, members in sides.items():
        of_side, own = margins[members], [prompts[place] for place in members.nonzero()[:, 0].tolist()]
        found[name] = {"pairs": len(of_side), "prompts": len({*own}), "accuracy": None, "accuracy_interval": None}
        if own:
            found[name]["accuracy"] = pairwise_accuracy(of_side).item()
            found[name]["accuracy_interval"] = accuracy_interval(of_side, own, level)
    if min(found[name]["prompts"] for name in sides) < least_prompts:
        return found
    place = {prompt: row for row, prompt in enumerate(dict.fromkeys(prompts))}
    rows = torch.tensor([place[prompt] for prompt in prompts])
    columns = [part for members in sides.values() for part in (credit(margins) * members, members.double())]
    table = torch.zeros(len(place), 4, dtype=torch.double).index_add_(0, rows, torch.stack(columns, 1).double())

    def bias(drawn: Tensor) -> Tensor:
        right, pairs = drawn.sum(1).unflatten(-1, (2, 2)).unbind(-1)
        shares = right / pairs.clamp(min=1)  # at most 1 of e^20 resamples has no pair of a side
        return shares[..., 0] - shares[..., 1]

    return found | {"bias": bias(table[None]).item(), "interval": bootstrap_interval(table, bias, level)}


def reward_model_report(chosen: Tensor, rejected: Tensor, length_gaps: Tensor, level: float = 0.95) -> dict[str, Any]:
    """Return a reward model's accuracy and calibration error on held-out pairs, with bootstrap intervals, and more.

    The report also has the margins' mean and standard deviation, the mean scores of chosen and rejected answers, and
    the accuracy by length gap, see [`accuracy_by_length_gap`].

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
        "margin_std": margins.std().item() if len(margins) > 1 else 0.0,
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
