"""Compute the figures of policies that answered the same prompts."""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from ...evaluation import accuracy_interval
from ...rewards import repetition_watch, text_of


def mean_of(values: Sequence[float | None]) -> dict[str, Any]:
    """
    Return the mean of the values that are not None, and its standard error s/√n, s² being Σ(x − mean)²/(n − 1).

    Args:
        values: one for each answer; None where a reward has none.

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
        prompts: (N,) name of the prompt; rows of the same prompt are resampled together.

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


def self_bleu(texts: Sequence[str], orders: int = 4) -> float | None:
    """
    Return the mean BLEU of each text with all others as its references (Zhu et al. 2018, 1802.01886); 1 if all agree.

    BLEU = exp(min(0, 1 − r/c)) · (Π pₙ)^(1/N). pₙ is the share of a text's n-grams of words that a reference has, each
    counted at most as often as in the reference that has it most. c is the text's length, and r the reference's that
    is nearest to it. N is `orders`, or c if that is less. There is no smoothing: without a common N-gram it is 0.

    Args:
        texts: (M,) answers.
        orders: the longest n-grams.

    Returns:
        The mean over the texts that have a word; None for fewer than two of them.
    """
    rows = [words for words in (text.split() for text in texts) if words]
    if len(rows) < 2:
        return None
    lengths = Counter(map(len, rows))
    logs = [0.0] * len(rows)
    for n in range(1, orders + 1):
        counts = [Counter(zip(*(words[i:] for i in range(n)), strict=False)) for words in rows]
        most: dict[Any, list[int]] = {}  # of each n-gram: its two highest counts in a text
        for count in counts:
            for gram, times in count.items():
                most[gram] = sorted([*most.get(gram, [0, 0]), times])[1:]
        for place, count in enumerate(counts):
            if not count:  # fewer than n words
                continue
            # In the other texts: the highest count, unless that is this text's own
            elsewhere = {
                gram: most[gram][0] if most[gram][1] == times else most[gram][1] for gram, times in count.items()
            }
            met = sum(min(times, elsewhere[gram]) for gram, times in count.items())
            share = met / count.total()
            logs[place] += (math.log(share) if share else -math.inf) / min(orders, len(rows[place]))
    found = []
    for words, log in zip(rows, logs, strict=True):
        size = len(words)
        others = [other for other, times in lengths.items() if other != size or times > 1]
        nearest = min(others, key=lambda other: (abs(other - size), other))
        found.append(math.exp(min(0.0, 1 - nearest / size) + log))
    return sum(found) / len(found)


def policy_figures(
    answers: Sequence[Mapping[str, Any]],
    scored: Mapping[str, Sequence[float | None]],
    kl: Sequence[float] | None,
) -> dict[str, Any]:
    """
    Return the figures of one policy that need no other policy.

    Args:
        answers: (N,) with `prompt`, `completion`, `completion_ids` and `finished`.
        scored: name of each reward → (N,) its scores.
        kl: (N,) log π(y | x) − log π_ref(y | x); None if there is none.

    Returns:
        `rewards`, `kl`, `length`: means with standard errors; `cut_off`; `distinct_3`, `repeated` and `self_bleu`.
    """
    repetition: dict[str, Any] = {}
    repetition_watch(**{f"{key}s": [row[key] for row in answers] for key in ("prompt", "completion")},
                     log_metric=repetition.__setitem__)  # fmt: skip
    return {
        "rewards": {reward: mean_of(values) for reward, values in scored.items()},
        "kl": None if kl is None else mean_of(kl),
        "length": mean_of([float(len(row["completion_ids"])) for row in answers]),
        "cut_off": sum(not row["finished"] for row in answers) / len(answers),
        "distinct_3": repetition.get("repetition/distinct_3"),
        "repeated": repetition.get("repetition/repeated"),
        "self_bleu": self_bleu([text_of(row["completion"]) for row in answers]),
    }
