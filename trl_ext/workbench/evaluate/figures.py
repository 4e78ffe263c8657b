"""Compute the figures of policies that answered the same prompts, from numbers alone."""

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from ...evaluation import accuracy_interval


def mean_of(values: Sequence[float | None]) -> dict[str, Any]:
    """
    Return the mean of the values that are not None, and its standard error s/√n, s² being Σ(x − mean)²/(n − 1).

    Args:
        values: one for each answer; None where there is none, as where a reward does not apply.

    Returns:
        `mean`, `standard_error` (None for fewer than two values), `count`.
    """
    known = torch.tensor([value for value in values if value is not None], dtype=torch.double)
    error = (known.std() / len(known) ** 0.5).item() if len(known) > 1 else None
    return {"mean": known.mean().item() if len(known) else None, "standard_error": error, "count": len(known)}


def win_rate(margins: Sequence[float | None], prompts: Sequence[Hashable]) -> dict[str, Any]:
    """
    Return the share of prompts on which a policy's answer beats the baseline's; a tie counts one half.

    The interval is at 95 %, paired by prompt: each prompt gives one margin, and prompts are resampled (percentile
    bootstrap, Efron 1979). Below 30 prompts, where a bootstrap says too little, it is Wilson's (1927).

    Args:
        margins: (N,) for each prompt, the policy's score minus the baseline's; None leaves the prompt out.
        prompts: (N,) what names the prompt; rows of the same prompt are resampled together.

    Returns:
        `win_rate`, `interval` (None for fewer than two prompts), `wins`, `ties`, `losses`.
    """
    known = [(margin, prompt) for margin, prompt in zip(margins, prompts, strict=True) if margin is not None]
    values = torch.tensor([margin for margin, _ in known], dtype=torch.double)
    wins, ties, losses = (int(found.sum()) for found in (values > 0, values == 0, values < 0))
    named = [prompt for _, prompt in known]
    return {
        "win_rate": (wins + ties / 2) / len(known) if known else None,
        "interval": list(accuracy_interval(values, named)) if len(set(named)) > 1 else None,
        "wins": wins,
        "ties": ties,
        "losses": losses,
    }


def margins(ours: Sequence[float | None], theirs: Sequence[float | None]) -> list[float | None]:
    """Return the score of each of our answers minus that of theirs; None where one of the two has no score."""
    pairs = zip(ours, theirs, strict=True)
    return [None if mine is None or other is None else mine - other for mine, other in pairs]
