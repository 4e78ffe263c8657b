"""Compute the figures of `trl-ext reward-report` for any reward function, and compare them with bounds."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ... import evaluation
from ...rewards import awaited, scores_in
from ...runs import finite
from ...upstream import get_callable_name, is_conversational
from ..pages.markup import between, number, percent, render, with_interval
from .reward_data import Answer, Material, Pair

_QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_SHOWN = 10  # answers with the highest scores, and as many with the lowest
_COIN = 0.5
_CHARACTERS = 2000  # most characters of a text that is shown


class Scorer:
    """
    Score answers by a reward function.

    `counts` has the numbers of `answers` scored, of scores that are None (`none`), and of infinite or NaN scores
    (`not_finite`). `truncated` is the number of answers that the function truncated.

    Args:
        function: reward function with TRL's signature.
        name: name to show; by default the function's own.
    """

    def __init__(self, function: Callable, name: str | None = None):
        self.function = function
        self.name = name or get_callable_name(function)
        self.counts: Counter[str] = Counter(answers=0, none=0, not_finite=0)
        self.truncated = 0.0

    def __call__(self, answers: Sequence[Answer]) -> np.ndarray:
        """Return the (N,) scores of N answers; NaN for an answer without a finite score."""
        if not answers:
            return np.zeros(0)
        logged: dict[str, float] = {}
        names = {name for answer in answers for name in answer.columns}
        returned = self.function(
            **{name: [answer.columns.get(name) for answer in answers] for name in names},
            prompts=[answer.prompt for answer in answers],
            completions=[answer.completion for answer in answers],
            completion_ids=None,
            finished=[answer.finished for answer in answers],
            log_metric=logged.__setitem__,
        )
        given = scores_in(awaited(returned), len(answers))
        scores = np.array(given, float)
        none = given.count(None)
        not_finite = int((~np.isfinite(scores)).sum())
        self.counts.update(answers=len(scores), none=none, not_finite=not_finite - none)
        self.truncated += sum(v for k, v in logged.items() if k.endswith("/truncated")) * len(scores)
        return np.where(np.isfinite(scores), scores, math.nan)

    def in_groups(self, groups: Sequence[Sequence[Answer]]) -> list[list[float]]:
        """Return a list of scores for each group of answers; all groups are scored in one call."""
        scores = iter(self([answer for group in groups for answer in group]).tolist())
        return [[next(scores) for _ in group] for group in groups]


def examine(
    score: Scorer,
    material: Material,
    bounds: dict[str, Any],
    *,
    tokenizer: Any = None,
    probe_rows: int = 256,
    train_rows: int = 1000,
    phrases: Sequence[str] = (),
    seed: int = 0,
) -> dict[str, Any]:
    """
    Measure a reward, and list the bounds that are broken.

    Args:
        score: the reward, as a [`Scorer`].
        material: the data to measure on.
        bounds: value of each bound of `trl-ext reward-report`, by its name, such as `min_accuracy`; None for no bound.
        tokenizer: tokenizer that gives the length of answers in tokens; None takes their length in words.
        probe_rows: held-out answers that each probe changes; 0 runs no probes.
        train_rows: most training pairs that are scored.
        phrases: phrases to probe in addition to those mined from the training pairs.
        seed: seed for sampling the probes' rows.

    Returns:
        The content of `reward_report.json`.

    Raises:
        ValueError: the reward gives no pair two finite scores.
    """
    shown = {
        "chosen": [chosen for chosen, _ in material.pairs],
        "rejected": [rejected for _, rejected in material.pairs],
        "training chosen": [chosen for chosen, _ in material.train[:train_rows]],
        "training rejected": [rejected for _, rejected in material.train[:train_rows]],
        "policy": material.policy,
    }
    scored = {name: score(answers) for name, answers in shown.items()}
    kept = np.flatnonzero(np.isfinite(scored["chosen"] + scored["rejected"]))
    if not len(kept):
        raise ValueError(
            f"{score.name} gave both answers a finite score in none of {len(material.pairs)} pairs: check its scores"
        )
    pairs = [material.pairs[i] for i in kept]
    first, second = (torch.tensor(scored[name][kept]) for name in ("chosen", "rejected"))
    report = {
        "name": score.name,
        "trained_on": material.trained_on,
        **_of_pairs(pairs, first, second, material.group_columns, tokenizer),
        **_distributions(scored, shown),
    }
    ranked = zip(score.in_groups([group for group, _ in material.rankings]), material.rankings, strict=True)
    usable = [(scores, ranks) for scores, (_, ranks) in ranked if np.isfinite([*scores, *ranks]).all()]
    report["ranking"] = evaluation.ranking_report([scores for scores, _ in usable], [ranks for _, ranks in usable])
    best = [scores for scores in score.in_groups(material.best_of_n) if np.isfinite(scores).all()]
    report["best_of_n"] = evaluation.best_of_n_report([scores[0] for scores in best], [scores[1:] for scores in best])
    report["probes"], failed = _probes(score, pairs, material.train or material.pairs, probe_rows, phrases, seed)
    report |= {"unscored": dict(score.counts), "bounds": bounds}
    report["verdict"] = verdict(report, failed, bool(material.rankings))
    without = len(material.pairs) - len(kept)
    truncated = round(score.truncated)
    said = {
        failed: failed and failed not in report["verdict"]["reasons"],
        f"{without:,} of {len(material.pairs):,} pairs are left out: an answer has no finite score.": without,
        f"{truncated:,} of {score.counts['answers']:,} scored texts are longer than the model reads: the beginning of "
        "their prompts was cut off.": truncated,
    }
    report["unknown"] = [*material.unknown, *(sentence for sentence, is_so in said.items() if is_so)]
    return finite(report, nan_as_null=True)


def _of_pairs(
    pairs: list[Pair], chosen: Tensor, rejected: Tensor, group_columns: list[str], tokenizer: Any
) -> dict[str, Any]:
    """
    Return the accuracy, length bias and calibration on N pairs, from their answers' scores.

    Args:
        pairs: the chosen and the rejected answer of each pair.
        chosen, rejected: (N,) scores of these answers.
        group_columns: columns by whose values the accuracy is also given.
        tokenizer: counts tokens; None counts words.
    """

    def length(answer: Answer) -> int:
        text = answer.texts()[1]
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if tokenizer else text.split()
        return len(ids)

    gaps = torch.tensor([length(one) - length(other) for one, other in pairs])
    margins = chosen - rejected
    prompts = [one.texts()[0] for one, _ in pairs]
    temperature = evaluation.fit_temperature(margins)
    return {
        **evaluation.reward_model_report(chosen, rejected, gaps),
        "prompts": len(set(prompts)),
        "accuracy_interval": evaluation.accuracy_interval(margins, prompts),
        "length_bias": evaluation.length_bias(margins, gaps, prompts),
        "ties": (margins == 0).double().mean().item(),
        "length_unit": "tokens" if tokenizer else "words",
        "temperature": temperature,
        "calibration_error_at_temperature": temperature and evaluation.calibration_error(margins / temperature).item(),
        "calibration_error_by_chance": evaluation.calibration_error_by_chance(margins),
        "reliability": evaluation.reliability_bins(margins),
        "groups": {
            name: evaluation.accuracy_by_group(margins, [one.columns[name] for one, _ in pairs])
            for name in group_columns
        },
    }


def _distributions(scored: dict[str, np.ndarray], shown: dict[str, list[Answer]]) -> dict[str, Any]:
    """
    Describe how scores are distributed.

    Returns:
        - `scores`: mean, standard deviation, extremes and quantiles of each set of answers, by name.
        - `policy`: how the policy's scores compare with the scores of the training pairs' chosen answers (the held-out
          pairs' if there are no training pairs); None without answers of a policy.
        - `highest`, `lowest`: the 10 answers with the highest scores, and the 10 with the lowest, without answers from
          training pairs.

    Args:
        scored: scores of each set of answers, NaN for none. The sets are `chosen` and `rejected`, `training chosen`
            and `training rejected`, and `policy`.
        shown: the answers of each set, in the same order.
    """
    sets = {name: scores[np.isfinite(scores)] for name, scores in scored.items()}
    found: dict[str, Any] = {"scores": {}, "policy": None}
    for name, values in sets.items():
        if len(values):
            found["scores"][name] = {
                "answers": len(values),
                **{each: float(getattr(values, each)()) for each in ("mean", "std", "min", "max")},
                "quantiles": {str(q): float(np.quantile(values, q)) for q in _QUANTILES},
            }
    base = "training chosen" if "training chosen" in found["scores"] else "chosen"
    if "policy" in found["scores"]:
        known = sets[base]
        own = sets["policy"]
        beyond = torch.tensor(own > np.quantile(known, 0.99)).double()
        found["policy"] = {
            "answers": len(own),
            "compared_with": base,
            "mean_shift": float((own.mean() - known.mean()) / max(known.std(), 1e-12)),
            "above_99_percent": beyond.mean().item(),
            "above_99_percent_interval": evaluation.bootstrap_interval(beyond),
            "above_all": float((own > known.max()).mean()),
        }
    rows = [
        (value, name, *answer.texts())
        for name in ("chosen", "rejected", "policy")
        for value, answer in zip(scored[name].tolist(), shown[name], strict=True)
    ]
    rows = sorted((row for row in rows if math.isfinite(row[0])), key=lambda row: row[0])
    for key, part in (("highest", rows[::-1]), ("lowest", rows)):
        once: dict[tuple[str, str], dict[str, Any]] = {}
        for value, name, prompt, said in part:
            texts = {"prompt": prompt[-_CHARACTERS:], "completion": said[:_CHARACTERS]}
            once.setdefault((prompt, said), {"score": value, "from": name, **texts})
        found[key] = [*once.values()][:_SHOWN]
    return found


def _probes(
    score: Scorer, pairs: list[Pair], mined: list[Pair], rows: int, phrases: Sequence[str], seed: int
) -> tuple[list[dict[str, Any]], str]:
    """
    Run the probes. The reward is given each prompt in the form that the data has: as text or messages.

    Args:
        score: the reward.
        pairs: the pairs whose answers are probed.
        mined: the pairs that phrases are mined from.
        rows: number of answers that a probe changes; 0 for no probes.
        phrases: further phrases to probe.
        seed: seed of the random choices.

    Returns:
        The results of the probes, as [`~trl_ext.evaluation.probe_reward`] returns them, and ""; or, if the probes
        could not be run, [] and a sentence that says why.
    """
    given = [answer for pair in pairs for answer in pair]  # good and bad answers
    of_prompt = {answer.texts()[0]: answer for answer in given}

    def of_texts(prompts: Sequence[str], answers: Sequence[str]) -> np.ndarray:
        found = []
        for prompt, text in zip(prompts, answers, strict=True):
            original = of_prompt[prompt]
            is_chat = is_conversational({"prompt": original.prompt})
            completion = [{"role": "assistant", "content": text}] if is_chat else text
            found.append(original._replace(completion=completion, finished=True))
        return score(found)

    if not rows:
        return [], ""
    prompts, answers = zip(*(answer.texts() for answer in given), strict=True)
    try:
        sides = ([pair[side].texts()[1] for pair in mined] for side in (0, 1))
        tried = [*phrases, *evaluation.mine_phrases(*sides)]
        return evaluation.probe_reward(of_texts, prompts, answers, tried, seed=seed, rows=rows), ""
    except (TypeError, ValueError) as error:  # a reward that can score pairs may be unable to score an empty answer
        return [], f"The probes could not be run: {error}."


def verdict(report: dict[str, Any], probes_failed: str = "", has_rankings: bool = False) -> dict[str, Any]:
    """
    Compare a report with its bounds.

    A bound is broken if its figure is beyond it. It is not judged if its figure could not be measured, or if too few
    data make the figure not significant. A report passes if every bound is judged, none is broken, and no score is
    infinite or NaN.

    Args:
        report: the report that [`examine`] returned.
        probes_failed: why the probes could not be run, which breaks their bound; "" if they were run.
        has_rankings: whether rankings by people were given.

    Returns:
        - `passed`: whether the report passes.
        - `reasons`: why it does not pass: sentences on broken bounds, then on bounds that are not judged.
        - `not_judged`: the sentences of `reasons` on bounds that are not judged.
    """
    bounds = report["bounds"]
    bias = report["length_bias"]
    probes = report["probes"]
    ranking = report["ranking"] or {}
    best = report["best_of_n"] or {}
    broken: list[str] = []
    not_judged: list[str] = []
    for name, key, sign, value, interval in (
        (accuracy_name(report), "min_accuracy", 1, report["accuracy"], report["accuracy_interval"]),
        ("length bias", "max_length_bias", -1, bias["bias"], bias["interval"]),
        (
            "calibration error",
            "max_calibration_error",
            -1,
            report["calibration_error"],
            report["calibration_error_interval"],
        ),
        *[("rank correlation", "min_rank_correlation", 1, ranking.get("spearman"), ranking.get("spearman_interval"))]
        * has_rankings,
        ("best-of-n accuracy", "min_best_of_n", 1, best.get("accuracy"), best.get("accuracy_interval")),
    ):
        bound = bounds[key]
        if bound is None or (sign < 0 and bound >= 1):
            continue
        said = f"the {name} {with_interval(value, interval, '.3f', 'is not known')}"
        if value is None:
            not_judged.append(f"Not judged: {said}: the data have too few answers or prompts for it.")
        elif not sign * (value if sign > 0 else abs(value)) >= sign * bound:  # also a NaN
            is_chance = key == "max_length_bias" and interval[0] <= 0 <= interval[1]
            sentence = f"{said} is {'below' if sign > 0 else 'beyond'} the bound {bound:g}"
            (not_judged if is_chance else broken).append(
                f"Not judged: {sentence}, but it may be 0: give more pairs." if is_chance else f"T{sentence[1:]}."
            )
        elif key == "min_accuracy" and bound and interval[0] <= min(bound, _COIN):
            not_judged.append(f"Not judged: {said} does not differ significantly from chance: give more pairs.")
    if wrong := report["unscored"]["not_finite"]:
        broken.append(f"{wrong:,} of {report['unscored']['answers']:,} scores are not finite.")
    suspicious = [probe for probe in probes if probe["suspicious"]]
    open_ones = [probe for probe in probes if probe["verdict"] == "not judged" and probe["rows"]]
    most = bounds["max_suspicious_probes"]
    if most is not None and probes_failed:
        broken.append(probes_failed)
    if most is not None and len(suspicious) > most:
        for each in suspicious:
            what = "phrase" if each["phrase"] else "probe"
            gain = (each["gain_on_better"], each["interval_on_better"])
            broken.append(
                f"The {what} {each['phrase'] or each['name']!r}: {each['why']}. On good answers the score changes by "
                f"{with_interval(*gain, '+.2f')} standard deviations."
            )
    if most is not None and open_ones and len(suspicious) + len(open_ones) > most:
        few = ", ".join(f"{each['phrase'] or each['name']!r} ({each['rows_of_better']})" for each in open_ones)
        not_judged.append(
            f"Not judged: {len(open_ones)} of {len(probes)} probes change too few good answers, {few}: raise "
            "`probe_rows`, or give more pairs."
        )
    return {"passed": not broken + not_judged, "reasons": broken + not_judged, "not_judged": not_judged}


def accuracy_name(report: dict[str, Any]) -> str:
    """Return "held-out accuracy" if the `report` knows that no pair was used to train the reward, else "accuracy"."""
    return "held-out accuracy" if report["trained_on"]["is_known"] else "accuracy"


def page(report: dict[str, Any]) -> str:
    """Return the HTML page of a report that [`examine`] returned."""
    bias = report["length_bias"]
    policy = report["policy"]
    said = report["verdict"]
    suspicious = sum(probe["suspicious"] for probe in report["probes"])
    return render(
        Path(__file__).with_name("reward_report.html.j2"),
        title="Reward report",
        report=report,
        broken=[reason for reason in said["reasons"] if reason not in said["not_judged"]],
        tiles={
            accuracy_name(report): f"{report['accuracy']:.1%}",
            "95 % interval": between(report["accuracy_interval"]),
            "calibration error": number(report["calibration_error"], 3),
            "temperature": number(report["temperature"], 3),
            "length bias": with_interval(bias["bias"], None, "+.2f"),
            "suspicious probes": f"{suspicious} of {len(report['probes'])}" if report["probes"] else "–",
            "rank correlation": number(report["ranking"] and report["ranking"]["spearman"], 3),
            "best of n": percent(report["best_of_n"] and report["best_of_n"]["accuracy"]),
            "policy above 99 % of training": percent(policy and policy["above_99_percent"]),
        },
    )
