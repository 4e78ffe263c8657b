"""Compare a reward model's ranks of several answers to a prompt with people's ranks and choices."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from scipy.stats import kendalltau, spearmanr
from torch import Tensor

from .bootstrap import bootstrap_interval


def rank_correlation(scores: Tensor, ranks: Tensor) -> tuple[float, float] | None:
    """Return Spearman's ρ and Kendall's τ-b between the scores and people's ranks of one prompt's answers.

    Args:
        scores: (n,) the model's scores; higher is better.
        ranks: (n,) people's ranks; 1, or the lowest rank, is the best answer.

    Returns:
        ρ and τ-b, 1 for the same order; both 0 if all scores are equal; None if all ranks are equal.

    Raises:
        ValueError: the shapes differ, or there are fewer than two answers.
    """
    if scores.shape != ranks.shape or scores.ndim != 1 or len(scores) < 2:
        raise ValueError(
            f"scores and ranks must both be (n,) with n of 2 or more, got {tuple(scores.shape)} and "
            f"{tuple(ranks.shape)}: give each answer a score and a rank"
        )
    ours, theirs = scores.double().tolist(), (-ranks.double()).tolist()
    if len({*theirs}) == 1:
        return None
    if len({*ours}) == 1:
        return 0.0, 0.0
    return float(spearmanr(ours, theirs).statistic), float(kendalltau(ours, theirs).statistic)


def ranking_report(scores: Sequence[Sequence[float]], ranks: Sequence[Sequence[float]]) -> dict[str, Any] | None:
    """Return the rank correlations, averaged over prompts, with bootstrap intervals over prompts.

    Args:
        scores, ranks: for each prompt, the scores and ranks of its answers, as for [`rank_correlation`].

    Returns:
        None if people ranked all answers alike for each prompt; else a dictionary with the keys

        - `prompts`: number of prompts that are averaged over;
        - `all_tied`: number of prompts left out, since people ranked all of their answers alike;
        - `answers`: mean number of answers of the averaged prompts;
        - `spearman`, `spearman_interval`, `kendall`, `kendall_interval`: the mean correlations and their intervals.
    """
    found = [rank_correlation(torch.tensor(a), torch.tensor(b)) for a, b in zip(scores, ranks, strict=True)]
    both = torch.tensor([each for each in found if each is not None], dtype=torch.double)
    if not len(both):
        return None
    counted = [len(answers) for answers, each in zip(ranks, found, strict=True) if each is not None]
    report: dict[str, Any] = {
        "prompts": len(both),
        "all_tied": len(found) - len(both),
        "answers": sum(counted) / len(counted),
    }
    for place, name in enumerate(("spearman", "kendall")):
        report[name] = both[:, place].mean().item()
        report[f"{name}_interval"] = bootstrap_interval(both[:, place])
    return report


def best_of_n_credit(chosen: float, rejected: Sequence[float]) -> float:
    """Return 1 if the chosen answer scores above all others, 0 if another scores higher (RewardBench 2, 2506.01937).

    If k answers share the highest score, and the chosen one is among them, return 1/k.
    """
    if any(other > chosen for other in rejected):
        return 0.0
    return 1 / (1 + sum(other == chosen for other in rejected))


def best_of_n_report(chosen: Sequence[float], rejected: Sequence[Sequence[float]]) -> dict[str, Any] | None:
    """Return the share of prompts whose chosen answer scores highest, its bootstrap interval, and the share by chance.

    Args:
        chosen: score of each prompt's chosen answer.
        rejected: scores of each prompt's other answers.

    Returns:
        None without prompts; else a dictionary with the keys

        - `prompts`: their number;
        - `answers`: mean number of answers of a prompt;
        - `accuracy` and `accuracy_interval`: the mean of [`best_of_n_credit`] and its interval;
        - `chance`: the accuracy of random scores.
    """
    if not chosen:
        return None
    credits = torch.tensor([best_of_n_credit(a, b) for a, b in zip(chosen, rejected, strict=True)])
    counts = torch.tensor([1 + len(each) for each in rejected], dtype=torch.double)
    return {
        "prompts": len(credits),
        "answers": counts.mean().item(),
        "accuracy": credits.mean().item(),
        "accuracy_interval": bootstrap_interval(credits),
        "chance": (1 / counts).mean().item(),
    }


def rankings_of_pairs(
    prompts: Sequence[Hashable], chosen: Sequence[Hashable], rejected: Sequence[Hashable]
) -> list[tuple[Hashable, list[Hashable], list[int]]]:
    """Recover rankings of three or more answers to a prompt from pairs that compare every two of these answers.

    Args:
        prompts, chosen, rejected: for each pair, what identifies its prompt and its answers, such as their texts.

    Returns:
        Three values for each ranking: the prompt, its answers, and their ranks, 1 for the best. Left out are prompts
        with fewer than three answers, with a missing pair, or with pairs that contradict each other.
    """
    wins: dict[Hashable, set[tuple[Hashable, Hashable]]] = defaultdict(set)
    for prompt, better, worse in zip(prompts, chosen, rejected, strict=True):
        wins[prompt].add((better, worse))
    found = []
    for prompt, pairs in wins.items():
        answers = list(dict.fromkeys(answer for pair in sorted(pairs, key=repr) for answer in pair))
        won = [sum(better == answer for better, _ in pairs) for answer in answers]
        compared = {frozenset(pair) for pair in pairs}
        # The pairs give a ranking if every two answers are compared once, and the answers win 0, 1, … n − 1 times
        if len(answers) > 2 and len(compared) == len(pairs) and sorted(won) == list(range(len(answers))):
            found.append((prompt, answers, [len(answers) - number for number in won]))
    return found
