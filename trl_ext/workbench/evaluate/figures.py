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
        values: a value for each answer; None where there is none.

    Returns:
        `mean` (None without values), `standard_error` (None for fewer than two values), and `count` of the values.
    """
    known = torch.tensor([value for value in values if value is not None], dtype=torch.double)
    error = (known.std() / len(known) ** 0.5).item() if len(known) > 1 else None
    return {"mean": known.mean().item() if len(known) else None, "standard_error": error, "count": len(known)}


def win_rate(margins: Sequence[float | None], prompts: Sequence[Hashable]) -> dict[str, Any]:
    """
    Return the share of prompts on which a policy's answer beats the baseline's; a tie counts one half.

    The 95 % interval is a percentile bootstrap over prompts (Efron 1979), which is paired, since a margin compares two
    answers to one prompt. With fewer than 30 prompts a bootstrap is too uncertain: the interval is Wilson's (1927).

    Args:
        margins: (N,) for each prompt, the policy's score minus the baseline's; None leaves the prompt out.
        prompts: (N,) names of the prompts; rows with the same name are resampled together.

    Returns:
        `win_rate`, its `interval` (None for fewer than two prompts), and the counts `wins`, `ties` and `losses`.
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
    """Return each score in `ours` minus the one at the same place in `theirs`; None where either is None."""
    pairs = zip(ours, theirs, strict=True)
    return [None if mine is None or other is None else mine - other for mine, other in pairs]


def self_bleu(texts: Sequence[str], orders: int = 4) -> float | None:
    """
    Return self-BLEU: the mean BLEU of each text with all other texts as references (Zhu et al. 2018, 1802.01886).

    It is 1 if all texts are the same. BLEU = exp(min(0, 1 − r/c)) · (Π pₙ)^(1/N), where

    - pₙ is the share of a text's n-grams (of words, n = 1 … N) that references have, too. An n-gram counts at most as
      often as it occurs in the reference that has it most often.
    - c is the text's length in words, and r the length of the reference that is nearest in length.
    - N is `orders`, or c if c is less.

    There is no smoothing: a text that has no N-gram in common with a reference has a BLEU of 0.

    Args:
        texts: (M,) answers.
        orders: largest n of the n-grams.

    Returns:
        The mean over the texts that have a word; None if fewer than two have one.
    """
    rows = [words for words in (text.split() for text in texts) if words]
    if len(rows) < 2:
        return None
    lengths = Counter(map(len, rows))
    logs = [0.0] * len(rows)
    for n in range(1, orders + 1):
        counts = [Counter(zip(*(words[i:] for i in range(n)), strict=False)) for words in rows]
        most: dict[Any, list[int]] = {}  # n-gram → its second highest and its highest count in any text
        for count in counts:
            for gram, times in count.items():
                most[gram] = sorted([*most.get(gram, [0, 0]), times])[1:]
        for place, count in enumerate(counts):
            if not count:  # fewer than n words
                continue
            # The highest count in another text: if the highest of all is this text's own, the second highest
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
    Return a policy's own figures, without those that compare it with the baseline.

    Args:
        answers: (N,) with `prompt`, `completion`, `completion_ids` and `finished`.
        scored: name of a reward → (N,) its scores.
        kl: (N,) log π(y | x) − log π_ref(y | x); None if the KL is not known.

    Returns:
        - `rewards`: name of a reward → mean score, as [`mean_of`] returns it.
        - `kl`, `length`: mean KL and mean tokens of an answer, as [`mean_of`] returns them; `kl` may be None.
        - `cut_off`: share of the answers that did not end by EOS.
        - `distinct_3`: different 3-grams as a share of all.
        - `repeated`: share of 3-grams that repeat one in the same answer.
        - `self_bleu`: see [`self_bleu`].
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
