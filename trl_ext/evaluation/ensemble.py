"""Measure an ensemble of reward models on held-out pairs: its accuracy, and how far its members disagree."""

from typing import Any, get_args

import torch
from torch import Tensor

from ..functional import disagreement, ensemble_score
from ..functional.ensemble import Combine
from .bootstrap import bootstrap_interval
from .reward_model import pairwise_accuracy


def ensemble_report(chosen: Tensor, rejected: Tensor) -> dict[str, Any]:
    """Return the accuracy of each way to combine members, and how far the members disagree.

    Args:
        chosen, rejected: (K, N) scores that K members give the two answers of N pairs.

    Returns:
        A dictionary with the keys

        - `pairs`: their number;
        - `accuracy` and `accuracy_interval`: for each way to combine the members' scores;
        - `disagreement`: its `mean` and quantiles over all answers, and its mean over the answers of those pairs that
          the members' mean score ranks right (`where_right`) and does not (`where_wrong`); None without such pairs;
        - `margin_correlation`: the correlation of two members' margins, averaged over all pairs of members.
    """
    both = torch.stack([chosen, rejected]).double()  # (2, K, N)
    spread = torch.stack([disagreement(scores) for scores in both])
    margins = both[0] - both[1]
    right = margins.mean(0) > 0
    combined = {how: ensemble_score(both[0], how) - ensemble_score(both[1], how) for how in get_args(Combine)}
    others = ~torch.eye(len(margins), dtype=torch.bool)
    return {
        "pairs": margins.size(1),
        "accuracy": {how: pairwise_accuracy(margin).item() for how, margin in combined.items()},
        "accuracy_interval": {how: bootstrap_interval(margin, pairwise_accuracy) for how, margin in combined.items()},
        "disagreement": {
            "mean": spread.mean().item(),
            **{f"quantile_{q}": spread.flatten().quantile(q).item() for q in (0.5, 0.9, 0.99)},
            "where_right": spread[:, right].mean().item() if right.any() else None,
            "where_wrong": spread[:, ~right].mean().item() if not right.all() else None,
        },
        "margin_correlation": margins.corrcoef()[others].mean().item(),
    }
