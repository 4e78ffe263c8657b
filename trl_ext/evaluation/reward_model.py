"""Evaluate reward models and ensembles on held-out pairs and ranked completions, and policies by a gold score."""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, get_args

import torch
from scipy.optimize import brentq
from scipy.stats import spearmanr
from torch import Tensor

from ..functional import Combine, disagreement, ensemble_score

_AT_ONCE = 2**22  # rows that are drawn at once: all resamples of a large set would fill gigabytes


def bootstrap_interval(
    values: Tensor,
    statistic: Callable[[Tensor], Tensor] = lambda resampled: resampled.mean(1),
    resamples: int = 4000,
    seed: int = 0,
) -> tuple[float, float]:
    """Return a statistic's confidence interval: its quantiles 2.5 % and 97.5 % over resampled rows.

    The bootstrap (Efron, 1979) estimates how a figure would vary on other samples of the same size. To compare two
    systems on the same prompts, pass the N differences of their values, in which the prompts' difficulty cancels.

    Args:
        values: (N,) one finite value for each row, or (N, K) for a statistic of K columns.
        statistic: maps (resamples, N) or (resamples, N, K) to (resamples,). The default is the mean.
        resamples: how often N rows are sampled with replacement.
        seed: seed of the sampling, which does not use the global generator.
    """
    values = values.detach().double().cpu()
    generator = torch.Generator().manual_seed(seed)
    most = max(_AT_ONCE // len(values), 1)
    drawn = []
    for start in range(0, resamples, most):
        size = min(most, resamples - start), len(values)
        rows = torch.randint(len(values), size, generator=generator)
        drawn.append(statistic(values[rows]))
    low, high = torch.cat(drawn).quantile(torch.tensor([0.025, 0.975], dtype=torch.double))
    return low.item(), high.item()


def wilson_interval(share: float, count: float) -> tuple[float, float]:
    """Return Wilson's 95 % confidence interval of a share (1927), valid for few rows and for shares of 0 and 1.

    With z = 1.96, its bounds are (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n).

    Args:
        share: p, in [0, 1].
        count: n, the number of rows.
    """
    z = 1.959964
    middle = share + z * z / (2 * count)
    half = z * (share * (1 - share) / count + (z / (2 * count)) ** 2) ** 0.5
    scale = 1 + z * z / count
    return max((middle - half) / scale, 0.0), min((middle + half) / scale, 1.0)


def pairwise_accuracy(margins: Tensor) -> Tensor:
    """Return the share of pairs whose chosen completion scores higher; a tie counts one half.

    Args:
        margins: (…, N) score of the chosen completion minus score of the rejected one.

    Returns:
        (…,) in [0, 1].
    """
    return credit(margins).mean(-1)


def credit(margins: Tensor) -> Tensor:
    """
    Return what each pair adds to the accuracy, float64 in the shape of `margins`: 1 if its margin is above 0, ½ if it
    is 0, else 0. A margin is the chosen completion's score minus the rejected one's.
    """
    return (margins > 0).double() + (margins == 0).double() / 2


def accuracy_interval(margins: Tensor, prompts: Sequence[Hashable]) -> tuple[float, float]:
    """Return a 95 % confidence interval of the accuracy, by resampling prompts, each with all of its pairs.

    Pairs that share a prompt, such as those of a ranking, are not independent. So prompts are resampled, not pairs (a
    bootstrap of clusters). With fewer than 30 prompts a bootstrap is unreliable, so Wilson's interval is returned,
    with the number of prompts as the number of rows.

    Args:
        margins: (N,) score of the chosen completion minus score of the rejected one.
        prompts: (N,) an identifier of each pair's prompt, such as its text.
    """
    table = sums_by_prompt(torch.stack([credit(margins), torch.ones(len(margins))], 1), prompts)
    if len(table) < 30:
        return wilson_interval(pairwise_accuracy(margins).item(), len(table))
    return bootstrap_interval(table, lambda drawn: drawn[..., 0].sum(1) / drawn[..., 1].sum(1))


def sums_by_prompt(columns: Tensor, prompts: Sequence[Hashable]) -> Tensor:
    """
    Add up the rows of `columns`, (N, K), that have the same prompt. Return (P, K) for P different prompts, in the
    order of their first rows. `prompts` identifies each row's prompt.
    """
    place: dict[Hashable, int] = defaultdict(lambda: len(place))
    rows = torch.tensor([place[prompt] for prompt in prompts])
    sums = torch.zeros(len(place), columns.size(1), dtype=torch.double)
    return sums.index_add_(0, rows, columns.double())


# ---- Measures ----


def accuracy_of(margins: Tensor) -> dict[str, Any]:
    """
    Return a dictionary with the number of `pairs`, their `accuracy`, and its Wilson interval `accuracy_interval`.
    `margins` are the (N,) scores of the chosen completions minus those of the rejected.
    """
    accuracy = pairwise_accuracy(margins).item()
    pairs = len(margins)
    return {"pairs": pairs, "accuracy": accuracy, "accuracy_interval": wilson_interval(accuracy, pairs)}


def accuracy_by_group(margins: Tensor, groups: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the accuracy for each value in a column of the data, the value with most pairs first.

    Args:
        margins: (N,) score of the chosen completion minus score of the rejected one.
        groups: the column's value for each pair. If this is a list, such as of annotators, the pair counts for each
            item.

    Returns:
        A dictionary for each value: the `value` as text, its number of `pairs`, their `accuracy`, and the accuracy's
        Wilson interval `accuracy_interval`.
    """
    of: dict[str, list[float]] = defaultdict(list)
    for margin, value in zip(margins.tolist(), groups, strict=True):
        for each in {*map(str, value if isinstance(value, (list, tuple)) else [value])}:
            of[each].append(margin)
    largest_first = sorted(of.items(), key=lambda item: (-len(item[1]), item[0]))
    return [
        {"value": value, **accuracy_of(torch.tensor(members, dtype=torch.double))} for value, members in largest_first
    ]


def accuracy_by_length_gap(margins: Tensor, length_gaps: Tensor, bins: int = 5) -> list[dict[str, Any]]:
    """Sort pairs into bins by how much longer the chosen completion is; return each bin's accuracy.

    The bins have about equal numbers of pairs. A reward model that prefers length is right where the chosen completion
    is longer, and wrong where it is shorter.

    Args:
        margins: (N,) score of the chosen completion minus score of the rejected one.
        length_gaps: (N,) tokens of the chosen completion minus tokens of the rejected one.
        bins: number of bins. Fewer are returned if one gap fills several, or if there are fewer pairs.

    Returns:
        A dictionary for each bin: its smallest gap `from` and largest gap `to`, the number of `pairs`, the `accuracy`,
        and its Wilson interval `accuracy_interval`.
    """
    shares = torch.linspace(0, 1, bins + 1, dtype=torch.double)[1:-1]
    edges = length_gaps.double().quantile(shares).unique()
    bin_of = torch.bucketize(length_gaps.double(), edges)
    rows = []
    for index in bin_of.unique():
        is_in = bin_of == index
        gaps = length_gaps[is_in]
        accuracy = accuracy_of(margins[is_in])
        rows.append({"from": gaps.min().item(), "to": gaps.max().item(), **accuracy})
    return rows


def length_bias(margins: Tensor, length_gaps: Tensor, prompts: Sequence[Hashable]) -> dict[str, Any]:
    """Return a reward model's accuracy where the chosen completion is longer, minus its accuracy where it is shorter.

    The bias is a − b: the model's accuracy a on pairs whose chosen completion is the longer one, minus its accuracy b
    on pairs whose chosen completion is the shorter one. If the longer completion is chosen in half of the pairs, the
    model prefers the longer completion in (a + 1 − b)/2 of the pairs: in 60 % with a bias of +0.2, in 50 % with a bias
    of 0, and in 40 % with a bias of −0.2.

    Args:
        margins: (N,) score of the chosen completion minus score of the rejected one.
        length_gaps: (N,) tokens of the chosen completion minus tokens of the rejected one.
        prompts: (N,) an identifier of each pair's prompt. The interval is a bootstrap over prompts.

    Returns:
        A dictionary with the keys

        - `bias`, in [−1, 1], and its `interval`; both None if a side has fewer than 20 prompts;
        - `longer` and `shorter`: for the pairs whose chosen completion is longer, and for those where it is shorter,
          the number of `pairs` and of `prompts`, the `accuracy` and its `accuracy_interval` (both None without pairs).
    """
    found: dict[str, Any] = {"bias": None, "interval": None}
    columns = []
    for name, members in (("longer", length_gaps > 0), ("shorter", length_gaps < 0)):
        own = [prompts[place] for place in members.nonzero()[:, 0].tolist()]
        found[name] = {"pairs": len(own), "prompts": len({*own}), "accuracy": None, "accuracy_interval": None}
        if own:
            found[name]["accuracy"] = pairwise_accuracy(margins[members]).item()
            found[name]["accuracy_interval"] = accuracy_interval(margins[members], own)
        columns += [credit(margins) * members, members]

    def bias(drawn: Tensor) -> Tensor:
        right, pairs, right_of_shorter, shorter = drawn.sum(-2).unbind(-1)
        # At most 1 of e^20 resamples has no pair of a side
        return right / pairs.clamp(min=1) - right_of_shorter / shorter.clamp(min=1)

    if min(found["longer"]["prompts"], found["shorter"]["prompts"]) >= 20:
        table = sums_by_prompt(torch.stack(columns, 1), prompts)
        found |= {"bias": bias(table).item(), "interval": bootstrap_interval(table, bias)}
    return found


def fit_temperature(margins: Tensor) -> float | None:
    """Return the temperature T that makes the labels of the pairs most likely, where P(chosen wins) = σ(margin / T).

    The log-likelihood Σ log σ(β · margin) is concave in β = 1/T (Guo et al., 1706.04599), so that its maximum is where
    its slope Σ margin · σ(−β · margin) is 0. If T is above 1, the model is too sure of itself; if below 1, not sure
    enough.

    Args:
        margins: (N,) score of the chosen completion minus score of the rejected one.

    Returns:
        The temperature, or None in three cases: the margins' mean is not above 0 (the model is no better than a coin);
        no margin is negative (any smaller T makes the labels more likely); T would be more than 10,000 times above or
        below the mean |margin|.
    """
    margins = margins.detach().double().cpu()
    unit = margins.abs().mean().item()  # of T, so that the search does not depend on the scores' scale
    end = math.log(1e4)

    def slope(log_beta: float) -> float:
        return (margins * (-math.exp(log_beta) * margins / unit).sigmoid()).sum().item()

    if not (margins.sum() > 0 and (margins < 0).any()):
        return None
    if slope(end) > 0 or slope(-end) < 0:
        return None
    return unit / math.exp(brentq(slope, -end, end))


def confidence_bins(margins: Tensor) -> tuple[Tensor, Tensor]:
    """
    Return two tensors in the shape of `margins`, (…, N): each pair's confidence σ(|margin|), and its bin. The bins 0
    to 9 are tenths of [½, 1].
    """
    confidence = margins.double().abs().sigmoid()
    return confidence, ((confidence - 0.5) * 20).long().clamp(max=9)


def calibration_error(margins: Tensor) -> Tensor:
    """Return the expected calibration error of the Bradley-Terry probabilities.

    ECE = Σ_b n_b/N · |accuracy_b − confidence_b| (Naeini et al., 2015; Guo et al., 1706.04599). The confidence of a
    pair is σ(|margin|), the model's probability of the completion that it prefers. Ten bins b divide [½, 1] evenly.

    Args:
        margins: (…, N) score of the chosen completion minus score of the rejected one.

    Returns:
        (…,) in [0, 1].
    """
    confidence, bin_of = confidence_bins(margins)
    gaps = torch.zeros(*margins.shape[:-1], 10, dtype=torch.double, device=margins.device)
    gaps = gaps.scatter_add(-1, bin_of, credit(margins) - confidence)
    return gaps.abs().sum(-1) / margins.shape[-1]


def calibration_error_by_chance(margins: Tensor, draws: int = 200, seed: int = 0) -> float:
    """Return the mean calibration error that a model with correct probabilities would show on pairs of these margins.

    A calibration error is a mean of absolute values, so on few pairs it is not near 0 even for a calibrated model
    (Bröcker and Smith, 2007). Only the part of a model's calibration error above the returned error counts against the
    model.

    Args:
        margins: (N,) score of the chosen completion minus score of the rejected one. Each sign is replaced by a random
            one, + with probability σ(|margin|).
        draws: how often random signs are sampled.
        seed: seed of the signs.
    """
    margins = margins.detach().double().cpu().abs()
    generator = torch.Generator().manual_seed(seed)
    is_right = torch.rand(draws, len(margins), generator=generator) < margins.sigmoid()
    return calibration_error(torch.where(is_right, margins, -margins)).mean().item()


def reliability_bins(margins: Tensor) -> list[dict[str, Any]]:
    """Return the points of a reliability diagram: the model's accuracy on the pairs of each bin of confidence.

    The bins are those of [`calibration_error`]: σ(|margin|) in ten even parts of [½, 1]; empty ones are left out.

    Args:
        margins: (N,) score of the chosen completion minus score of the rejected one.

    Returns:
        A dictionary for each bin: its bounds `from` and `to`, the mean `confidence` of its pairs, the number of
        `pairs`, the `accuracy`, and its Wilson interval `accuracy_interval`.
    """
    confidence, bin_of = confidence_bins(margins)
    return [
        {
            "from": 0.5 + index / 20,
            "to": 0.5 + (index + 1) / 20,
            "confidence": confidence[bin_of == index].mean().item(),
            **accuracy_of(margins[bin_of == index]),
        }
        for index in bin_of.unique().tolist()
    ]


def reward_model_report(chosen: Tensor, rejected: Tensor, length_gaps: Tensor) -> dict[str, Any]:
    """Return a reward model's accuracy and calibration error on held-out pairs, and further figures.

    Args:
        chosen, rejected: (N,) scores of the two completions of each pair.
        length_gaps: (N,) tokens of the chosen completion minus tokens of the rejected one.

    Returns:
        A dictionary with the keys

        - `pairs`: their number;
        - `accuracy` and `calibration_error`, and their 95 % bootstrap intervals `accuracy_interval` and
          `calibration_error_interval`;
        - `margin_mean` and `margin_std`, of the margins: chosen score minus rejected score;
        - `chosen_mean` and `rejected_mean`: the mean scores;
        - `accuracy_by_length_gap`: see [`accuracy_by_length_gap`].
    """
    margins = (chosen - rejected).double()
    return {
        "pairs": len(margins),
        "accuracy": pairwise_accuracy(margins).item(),
        "accuracy_interval": bootstrap_interval(margins, pairwise_accuracy),
        "calibration_error": calibration_error(margins).item(),
        "calibration_error_interval": bootstrap_interval(margins, calibration_error),
        "margin_mean": margins.mean().item(),
        "margin_std": margins.std().item() if len(margins) > 1 else 0.0,
        "chosen_mean": chosen.double().mean().item(),
        "rejected_mean": rejected.double().mean().item(),
        "accuracy_by_length_gap": accuracy_by_length_gap(margins, length_gaps),
    }


def ensemble_report(chosen: Tensor, rejected: Tensor) -> dict[str, Any]:
    """Return the accuracy of each way to combine members, and how far the members disagree.

    Args:
        chosen, rejected: (K, N) scores that K members give the two completions of N pairs.

    Returns:
        A dictionary with the keys

        - `pairs`: their number;
        - `accuracy` and `accuracy_interval`: dictionaries with a figure for each way to combine the members' scores,
          by its name in [`~trl_ext.functional.ensemble_score`];
        - `disagreement`: the standard deviation of the members' scores of a completion, averaged over all completions
          (`mean`), over the pairs that the members' mean score ranks right (`where_right`), and over the other pairs
          (`where_wrong`); None without such pairs;
        - `margin_correlation`: the correlation of two members' margins, averaged over all pairs of members.
    """
    chosen = chosen.double()
    rejected = rejected.double()
    spread = torch.stack([disagreement(chosen), disagreement(rejected)])
    margins = chosen - rejected
    right = margins.mean(0) > 0
    others = ~torch.eye(len(margins), dtype=torch.bool)
    combined = {how: ensemble_score(chosen, how) - ensemble_score(rejected, how) for how in get_args(Combine)}
    return {
        "pairs": margins.size(1),
        "accuracy": {how: pairwise_accuracy(margin).item() for how, margin in combined.items()},
        "accuracy_interval": {how: bootstrap_interval(margin, pairwise_accuracy) for how, margin in combined.items()},
        "disagreement": {
            "mean": spread.mean().item(),
            "where_right": spread[:, right].mean().item() if right.any() else None,
            "where_wrong": spread[:, ~right].mean().item() if not right.all() else None,
        },
        "margin_correlation": margins.corrcoef()[others].mean().item(),
    }


def ranking_report(scores: Sequence[Sequence[float]], ranks: Sequence[Sequence[float]]) -> dict[str, Any] | None:
    """Return Spearman's ρ between a model's scores and people's ranks of completions, averaged over prompts.

    Args:
        scores: for each prompt, the model's scores of its completions; higher is better.
        ranks: for each prompt, people's ranks of its completions; the lowest rank is the best completion.

    Returns:
        None if people ranked all completions of each prompt as equal; else a dictionary with the keys

        - `prompts`: number of prompts that are averaged over;
        - `all_tied`: number of prompts left out, since people ranked all their completions as equal;
        - `spearman` and `spearman_interval`: the mean of ρ, and its 95 % bootstrap interval over prompts. ρ is 0 for a
          prompt whose scores are all equal, and 1 if scores and people order its completions alike.
    """
    ranked = []
    for own, given in zip(scores, ranks, strict=True):
        if len({*given}) > 1:
            ranked.append((own, [-rank for rank in given]))
    if not ranked:
        return None
    rho = torch.tensor([spearmanr(own, given).statistic if len({*own}) > 1 else 0.0 for own, given in ranked])
    found = {"prompts": len(rho), "all_tied": len(scores) - len(rho)}
    return {**found, "spearman": rho.mean().item(), "spearman_interval": bootstrap_interval(rho)}


def best_of_n_report(chosen: Sequence[float], rejected: Sequence[Sequence[float]]) -> dict[str, Any] | None:
    """Return the share of prompts whose chosen completion scores highest, among all completions of the prompt.

    A prompt counts 1 if the chosen completion scores above all others, 0 if another scores higher, and 1/k if the
    chosen one is among k that share the highest score (RewardBench 2, 2506.01937).

    Args:
        chosen: score of each prompt's chosen completion.
        rejected: scores of each prompt's other completions.

    Returns:
        None without prompts; else a dictionary with the keys

        - `prompts`: their number;
        - `accuracy` and `accuracy_interval`: the mean over prompts, and its 95 % bootstrap interval;
        - `chance`: the accuracy of random scores.
    """
    if not chosen:
        return None
    pairs = [*zip(chosen, rejected, strict=True)]
    credits = torch.tensor([(max(others) <= own) / (1 + others.count(own)) for own, others in pairs])
    return {
        "prompts": len(credits),
        "accuracy": credits.mean().item(),
        "accuracy_interval": bootstrap_interval(credits),
        "chance": sum(1 / (1 + len(others)) for others in rejected) / len(credits),
    }
