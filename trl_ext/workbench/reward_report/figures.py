"""Compute the figures of `trl-ext reward-report`, for any function that scores."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ...evaluation import (
    accuracy_by_group,
    accuracy_interval,
    best_of_n_report,
    bootstrap_interval,
    calibration_error,
    calibration_error_by_chance,
    fit_temperature,
    length_bias,
    mine_phrases,
    probe_reward,
    ranking_report,
    reliability_bins,
    reward_model_report,
)
from ...rewards import awaited, scores_in, text_of
from ...runs import without_nan
from ...upstream import get_callable_name, is_conversational
from ..pages.markup import with_interval
from .data import Answers, Material

_QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_BINS = 40  # of histograms
_SHOWN = 10  # answers with the highest scores, and as many with the lowest
_NAMED = 12  # most probes that one sentence names
_FEW = 100  # of fewer pairs the report says that they are few
_COIN = 0.5
SIDES = ("longer", "shorter")  # what the chosen answer is, compared with the rejected one
_CHARACTERS = 2000  # most characters of a text that is shown


@dataclass
class Bounds:
    """Hold the bounds that a reward's figures must meet; None sets no bound."""

    min_accuracy: float | None = 0.6
    max_length_bias: float | None = 0.2
    max_calibration_error: float | None = None
    min_rank_correlation: float | None = 0.7
    min_best_of_n: float | None = None
    max_suspicious_probes: int | None = 0


class Scorer:
    """
    Score answers by a reward function. Count answers without a finite score, and those that the function truncated.

    Args:
        function: reward function with TRL's signature.
        name: name to show; by default the function's own.

    Raises:
        ValueError: the function failed; its error is in the message.
    """

    def __init__(self, function: Callable, name: str | None = None):
        self.function, self.name = function, name or get_callable_name(function)
        self.scored, self.unscored, self.infinite, self.truncated = 0, 0, 0, 0.0

    def __call__(self, answers: Answers) -> list[float]:
        """Return a score for each answer, NaN if it has no finite score."""
        if not len(answers):
            return []
        logged: dict[str, float] = {}
        names = {name for row in answers.columns for name in row}
        columns = {name: [row.get(name) for row in answers.columns] for name in names}
        try:
            returned = awaited(
                self.function(
                    **columns,
                    prompts=answers.prompts,
                    completions=answers.completions,
                    completion_ids=None,
                    finished=answers.finished,
                    log_metric=logged.__setitem__,
                )
            )
            found = [None if score is None else float(score) for score in scores_in(returned, len(answers))]
        except Exception as error:
            said = " ".join(str(error).split())
            raise ValueError(f"{self.name} cannot score: {type(error).__name__}: {said}") from error
        self.scored += len(found)
        self.unscored += sum(score is None for score in found)
        self.infinite += sum(score is not None and not math.isfinite(score) for score in found)
        self.truncated += sum(v for k, v in logged.items() if k.endswith("/truncated")) * len(found)
        return [math.nan if score is None or not math.isfinite(score) else score for score in found]


def length_of(text: Any, tokenizer: Any) -> int:
    """Return how many tokens an answer has, or how many words if `tokenizer` is None."""
    shown = text_of(text)
    if tokenizer is None:
        return len(shown.split())
    return len(tokenizer(shown, add_special_tokens=False, verbose=False)["input_ids"])


def examine(
    score: Scorer,
    material: Material,
    bounds: Bounds,
    *,
    tokenizer: Any = None,
    probe_rows: int = 256,
    phrases: Sequence[str] = (),
    seed: int = 0,
) -> dict[str, Any]:
    """
    Measure a reward, and say which bounds are broken.

    Args:
        score: the reward, as a [`Scorer`].
        material: the data to measure on.
        bounds: bounds that the figures must meet.
        tokenizer: tokenizer that gives the length of answers in tokens; None takes their length in words.
        probe_rows: held-out answers that each probe changes; 0 runs no probes.
        phrases: phrases to probe in addition to those mined from the training pairs.
        seed: seed for drawing the probes' rows.

    Returns:
        The content of `reward_report.json`.

    Raises:
        ValueError: the reward function fails, or gives no pair two finite scores.
    """
    unknown = list(material.unknown)
    chosen, rejected = score(material.chosen), score(material.rejected)
    kept = [i for i, both in enumerate(zip(chosen, rejected, strict=True)) if all(map(math.isfinite, both))]
    if not kept:
        raise ValueError(f"{score.name} gave none of the {len(chosen)} pairs two finite scores: correct the reward")
    if without := len(chosen) - len(kept):
        unknown.append(f"{without:,} of {len(chosen):,} pairs are left out: an answer has no finite score.")
    first, second = (torch.tensor([scores[i] for i in kept], dtype=torch.double) for scores in (chosen, rejected))
    margins = first - second
    lengths = [
        torch.tensor([length_of(answers.completions[i], tokenizer) for i in kept])
        for answers in (material.chosen, material.rejected)
    ]
    prompts = [text_of(material.chosen.prompts[i]) for i in kept]
    report: dict[str, Any] = {
        "name": score.name,
        **reward_model_report(first, second, lengths[0] - lengths[1]),
        "prompts": len(set(prompts)),
        "accuracy_interval": accuracy_interval(margins, prompts),
        "length_bias": length_bias(margins, lengths[0] - lengths[1], prompts),
        "trained_on": asdict(material.trained_on),
        "ties": (margins == 0).double().mean().item(),
        "length_unit": "words" if tokenizer is None else "tokens",
        **_calibration(margins, unknown),
        "groups": {
            name: accuracy_by_group(margins, [values[i] for i in kept]) for name, values in material.groups.items()
        },
    }
    _say_of_pairs(report, margins, unknown)
    scored = {"held-out chosen": chosen, "held-out rejected": rejected}
    scored |= {"training chosen": score(material.train_chosen), "training rejected": score(material.train_rejected)}
    scored["policy"] = score(material.policy)
    report |= _distributions(scored, material, unknown)
    report["ranking"] = _ranking(score, material, unknown)
    report["best_of_n"] = _best_of_n(score, material, unknown)
    report["probes"], failed = _probes(score, material, kept, probe_rows, phrases, seed, unknown)
    report["unscored"] = {"answers": score.scored, "none": score.unscored, "not_finite": score.infinite}
    if score.truncated >= 1:
        unknown.append(
            f"{round(score.truncated):,} of {score.scored:,} scored texts, probes included, are longer than the model "
            "reads: the beginning of their prompts was cut off."
        )
    report["bounds"] = asdict(bounds)
    report["verdict"] = verdict(report, bounds, unknown, failed, has_rankings=bool(material.rankings))
    report["unknown"] = unknown
    return without_nan(report)


def _calibration(margins: Tensor, unknown: list[str]) -> dict[str, Any]:
    temperature = fit_temperature(margins)
    if temperature is None:
        why = "no pair is ranked wrong" if not (margins < 0).any() else "the margins have no positive mean"
        unknown.append(f"No temperature fits: {why}.")
    after = None if temperature is None else calibration_error(margins / temperature).item()
    return {
        "temperature": temperature,
        "calibration_error_at_temperature": after,
        "calibration_error_by_chance": calibration_error_by_chance(margins),
        "reliability": reliability_bins(margins),
    }


def _say_of_pairs(report: dict[str, Any], margins: Tensor, unknown: list[str]) -> None:
    if report["ties"] == 1:
        unknown.append("Every pair is a tie: the reward tells no two answers apart.")
    if report["pairs"] < _FEW:
        low, high = report["accuracy_interval"]
        unknown.append(f"{report['pairs']} pairs are few: the accuracy may be anything from {low:.0%} to {high:.0%}.")
    if report["prompts"] < report["pairs"]:
        unknown.append(
            f"{report['pairs']:,} pairs have {report['prompts']:,} prompts: for the accuracy's interval, pairs of one "
            "prompt are drawn together."
        )


def _distributions(scored: dict[str, list[float]], material: Material, unknown: list[str]) -> dict[str, Any]:
    """
    Describe how scores are distributed.

    Returns:
        - `scores`: name of a set of answers → its mean, standard deviation, extremes, quantiles and histogram.
        - `histogram_edges`: the edges of all histograms.
        - `policy`: how the policy's scores compare with the scores of the training pairs' chosen answers (the held-out
          pairs' if there are no training pairs); None without answers of a policy.
        - `highest`, `lowest`: the answers with the highest and with the lowest scores.
    """
    found: dict[str, Any] = {"scores": {}, "policy": None}
    finite = {name: [score for score in scores if math.isfinite(score)] for name, scores in scored.items()}
    sets = {name: torch.tensor(scores, dtype=torch.double) for name, scores in finite.items()}
    both = torch.cat([*sets.values()])
    edges = torch.linspace(both.min().item(), both.max().item(), _BINS + 1, dtype=torch.double)
    for name, values in sets.items():
        if len(values):
            quantiles = values.quantile(torch.tensor(_QUANTILES, dtype=torch.double)).tolist()
            found["scores"][name] = {
                "answers": len(values),
                "mean": values.mean().item(),
                "std": values.std(correction=0).item(),
                "min": values.min().item(),
                "max": values.max().item(),
                "quantiles": dict(zip(map(str, _QUANTILES), quantiles, strict=True)),
                "histogram": _counts(values, edges),
            }
    found["histogram_edges"] = edges.tolist()
    base = "training chosen" if "training chosen" in found["scores"] else "held-out chosen"
    if base == "held-out chosen":
        unknown.append("There are no training pairs to compare scores with: name them by `train_name`.")
    if "policy" in found["scores"]:
        known, own = sets[base], sets["policy"]
        beyond = (own > known.quantile(0.99)).double()
        found["policy"] = {
            "answers": len(own),
            "compared_with": base,
            "mean_shift": ((own.mean() - known.mean()) / known.std(correction=0).clamp(min=1e-12)).item(),
            "above_99_percent": beyond.mean().item(),
            "above_99_percent_interval": bootstrap_interval(beyond),
            "above_all": (own > known.max()).double().mean().item(),
        }
    else:
        unknown.append("How the policy's own answers score is not known: give `policy_answers` or `policy`.")
    rows = []
    shown = {"held-out chosen": material.chosen, "held-out rejected": material.rejected, "policy": material.policy}
    for name in shown:
        rows += [(s, name, i) for i, s in enumerate(scored[name]) if math.isfinite(s)]
    rows.sort(key=lambda row: row[0])
    for key, part in (("highest", rows[::-1]), ("lowest", rows)):
        seen: dict[tuple[str, str], dict[str, Any]] = {}
        for value, name, i in part:
            prompt, said = (text_of(part[i]) for part in (shown[name].prompts, shown[name].completions))
            texts = {"prompt": prompt[-_CHARACTERS:], "completion": said[:_CHARACTERS]}
            seen.setdefault((prompt, said), {"score": value, "from": name, **texts})
            if len(seen) == _SHOWN:
                break
        found[key] = [*seen.values()]
    return found


def _counts(values: Tensor, edges: Tensor) -> list[int]:
    places = torch.bucketize(values, edges[1:-1].contiguous(), right=True)
    return torch.bincount(places, minlength=len(edges) - 1).tolist()


def _ranking(score: Scorer, material: Material, unknown: list[str]) -> dict[str, Any] | None:
    """Return the rank correlations of the scores with people's rankings; None, and a sentence, without any."""
    rankings = material.rankings
    if not rankings:
        unknown.append("There are no rankings by people, so the rank correlation is not known: give `ranking_name`.")
        return None
    scores = _in_parts(score, [answers for answers, _ in rankings])
    usable = [(s, ranks) for s, (_, ranks) in zip(scores, rankings, strict=True) if all(map(math.isfinite, s))]
    report = ranking_report([s for s, _ in usable], [r for _, r in usable])
    if report is None:
        unknown.append(
            "No ranking tells two answers apart, or none has finite scores, so the rank correlation is not known."
        )
        return None
    return {**report, "of_more_than_two": any(len(ranks) > 2 for _, ranks in usable)}


def _best_of_n(score: Scorer, material: Material, unknown: list[str]) -> dict[str, Any] | None:
    if not material.best_of_n:
        unknown.append("No row has several rejected answers, so best-of-n accuracy is not known.")
        return None
    scores = [each for each in _in_parts(score, material.best_of_n) if all(map(math.isfinite, each))]
    return best_of_n_report([each[0] for each in scores], [each[1:] for each in scores])


def _in_parts(score: Scorer, groups: Sequence[Answers]) -> list[list[float]]:
    """Return a list of scores for each group of answers; all groups are scored in one call."""
    flat = Answers()
    for group in groups:
        flat.extend(group)
    scores = iter(score(flat))
    return [[next(scores) for _ in range(len(group))] for group in groups]


def _probes(
    score: Scorer,
    material: Material,
    places: Sequence[int],
    rows: int,
    phrases: Sequence[str],
    seed: int,
    unknown: list[str],
) -> tuple[list[dict[str, Any]], str | None]:
    """
    Run the probes. The reward is given each prompt in the form that the data has: as text or messages.

    Returns:
        The results of the probes, and None; or [], and a sentence on why the probes could not be run.
    """
    if not rows:
        unknown.append("No probes were run (`probe_rows` is 0).")
        return [], None
    texts: list[tuple[str, str]] = []
    given: dict[str, tuple[Any, dict[str, Any]]] = {}
    for side in (material.chosen, material.rejected):  # good and bad answers
        of_side = side.texts()
        texts += [of_side[i] for i in places]
        given |= {of_side[i][0]: (side.prompts[i], side.columns[i]) for i in places}

    def of_texts(prompts: Sequence[str], answers: Sequence[str]) -> list[float]:
        found = Answers()
        for prompt, answer in zip(prompts, answers, strict=True):
            original, columns = given.get(prompt, (prompt, {}))
            is_chat = is_conversational({"prompt": original})
            found.add(original, [{"role": "assistant", "content": answer}] if is_chat else answer, True, columns)
        return score(found)

    prompts, answers = ([text[place] for text in texts] for place in (0, 1))
    tried = [*phrases, *mine_phrases(*material.mined)]
    try:
        return probe_reward(of_texts, prompts, answers, tried, seed=seed, rows=rows), None
    except ValueError as error:  # a reward that can score pairs may be unable to score an empty answer
        if isinstance(error.__cause__, RuntimeError):
            raise  # the probes' answers are not the cause: memory may have run out, for example
        return [], f"The probes could not be run: {error}."


def verdict(
    report: dict[str, Any],
    bounds: Bounds,
    unknown: list[str],
    probes_failed: str | None = None,
    has_rankings: bool = False,
) -> dict[str, Any]:
    """
    Compare a report with its bounds.

    A bound is broken if its figure is beyond it. It is not judged if its figure could not be measured, or if the data
    are too few to tell the figure from chance. A report passes if every bound is judged, none is broken, and no score
    is infinite or NaN. If a bound lies within its figure's interval, a sentence in `unknown` says that the data are
    too few to tell the figure from the bound.

    Args:
        report: as [`examine`] makes it.
        bounds: bounds that the figures must meet.
        unknown: list of sentences on what cannot be known, to which further sentences are added.
        probes_failed: why the probes could not be run, which breaks their bound; None if they were run.
        has_rankings: whether rankings by people were given.

    Returns:
        - `passed`: whether the report passes.
        - `reasons`: why it does not pass: sentences on broken bounds, then on bounds that are not judged.
        - `not_judged`: the sentences of `reasons` on bounds that are not judged.
    """
    reasons: list[str] = []
    not_judged: list[str] = []
    ranking, best = report["ranking"], report["best_of_n"]
    rank_bound = bounds.min_rank_correlation if ranking and ranking["of_more_than_two"] else None
    accuracy = accuracy_name(report)
    checks = [
        (accuracy, report, "accuracy", bounds.min_accuracy, True),
        ("calibration error", report, "calibration_error", bounds.max_calibration_error, False),
        ("rank correlation with people", ranking, "spearman", rank_bound, True),
        ("best-of-n accuracy", best, "accuracy", bounds.min_best_of_n, True),
    ]
    for name, found, key, bound, is_least in checks:
        if found is None or bound is None:
            continue
        value, (low, high) = found[key], found[f"{key}_interval"]
        measured = with_interval(value, (low, high), ".3f")
        many = f"{found['pairs']:,} pairs" if "pairs" in found else f"{found['prompts']:,} prompts"
        if value < bound if is_least else value > bound:
            side = "below" if is_least else "above"
            reasons.append(f"The {name} {measured} is {side} the bound {bound:g}.")
        elif name == accuracy and bound > 0 and low <= min(bound, _COIN):
            not_judged.append(f"Not judged: {many} are too few to tell the {name} {measured} from a coin's.")
        if low <= bound <= high:
            unknown.append(f"{many} are too few to tell the {name} {measured} from the bound {bound:g}.")
    if best is None and bounds.min_best_of_n:
        not_judged.append("Not judged: the best-of-n accuracy, since no row has several rejected answers.")
    if ranking is None and has_rankings and bounds.min_rank_correlation is not None:
        not_judged.append("Not judged: the rank correlation, since no ranking tells apart answers with finite scores.")
    _judge_length(report, bounds.max_length_bias, reasons, not_judged, unknown)
    if report["unscored"]["not_finite"]:
        reasons.append(
            f"{report['unscored']['not_finite']:,} of {report['unscored']['answers']:,} scores are not finite."
        )
    if probes_failed:
        (unknown if bounds.max_suspicious_probes is None else reasons).append(probes_failed)
    _judge_probes(report["probes"], bounds.max_suspicious_probes, reasons, not_judged, unknown)
    reasons += not_judged
    return {"passed": not reasons, "reasons": reasons, "not_judged": not_judged}


def accuracy_name(report: dict[str, Any]) -> str:
    """Return "held-out accuracy" if it is known that the reward was trained on none of the pairs, else "accuracy"."""
    return "held-out accuracy" if report["trained_on"]["is_known"] else "accuracy"


def _judge_length(
    report: dict[str, Any], bound: float | None, reasons: list[str], not_judged: list[str], unknown: list[str]
) -> None:
    """
    Compare the length bias with its bound.

    A sentence is added to `reasons` if the bound is broken, to `not_judged` if it cannot be judged, or to `unknown`
    if the data are too few to be sure.
    """
    found = report["length_bias"]
    if found["bias"] is None:
        few = (
            f"the length bias, since {found['longer']['prompts']} prompts have a pair whose chosen answer is longer, "
            f"and {found['shorter']['prompts']} one whose chosen answer is shorter: 20 of each are needed."
        )
        if bound is None or bound >= 1:
            unknown.append(f"Not known: {few}")
        else:
            not_judged.append(f"Not judged: {few}")
        return
    value, (low, high) = found["bias"], found["interval"]
    measured = with_interval(value, (low, high), "+.3f")
    if bound is None:
        return
    if abs(value) > bound and low <= 0 <= high:
        not_judged.append(
            f"Not judged: the length bias {measured} is beyond the bound {bound:g}, but {report['pairs']:,} pairs are "
            "too few to tell it from 0."
        )
    elif abs(value) > bound:
        sides = [f"{found[name]['accuracy']:.1%} of pairs whose chosen answer is {name}" for name in SIDES]
        reasons.append(
            f"The score follows length: it is right in {' and in '.join(sides)}, a length bias of {measured}; the "
            f"bound is {bound:g}."
        )
    elif max(-low, high) >= bound:
        unknown.append(
            f"{report['pairs']:,} pairs are too few to tell the length bias {measured} from the bound {bound:g}."
        )


def _judge_probes(
    probes: list[dict[str, Any]], bound: int | None, reasons: list[str], not_judged: list[str], unknown: list[str]
) -> None:
    """
    Compare the number of suspicious probes with the bound on it.

    If the bound is broken, a sentence on each suspicious probe is added to `reasons`. Probes that could not be judged
    may be suspicious, too: if with them the bound would be broken, a sentence on them is added to `not_judged`, else
    to `unknown`.
    """
    suspicious = [probe for probe in probes if probe["suspicious"]]
    open_ones = [probe for probe in probes if probe["verdict"] == "not judged"]
    idle = [repr(probe["phrase"] or probe["name"]) for probe in open_ones if not probe["rows"]]
    if len(idle) < len(probes):  # else all answers have the same score
        open_ones = [probe for probe in open_ones if probe["rows"]]
        if idle:  # such as a phrase that all answers have already, or another prompt's answer if there is one prompt
            listed = ", ".join(idle[:_NAMED])
            unknown.append(f"{len(idle)} of {len(probes)} probes change none of these answers: {listed}.")
    if bound is not None and len(suspicious) > bound:
        reasons += [probe_sentence(probe) for probe in suspicious]
    if open_ones:
        named = ", ".join(
            f"{probe['phrase'] or probe['name']!r} ({probe['rows_of_better']})" for probe in open_ones[:_NAMED]
        )
        more = f" and {len(open_ones) - _NAMED} more" if len(open_ones) > _NAMED else ""
        said = (
            f"{len(open_ones)} of {len(probes)} probes change too few good answers to be judged, {named}{more}: raise "
            "`probe_rows`, or give more pairs."
        )
        is_open = bound is not None and len(suspicious) + len(open_ones) > bound
        (not_judged if is_open else unknown).append(f"Not judged: {said}" if is_open else said)


def probe_sentence(probe: dict[str, Any]) -> str:
    """Describe a suspicious probe in one sentence."""
    said = f"The phrase {probe['phrase']!r} raises" if probe["phrase"] else f"The probe '{probe['name']}' raises"
    answers, gain, (low, high) = "good answers", probe["gain_on_better"], probe["interval_on_better"]
    if probe["expected"] == "down":
        said = f"The probe '{probe['name']}' should lower, but raises"
        if probe["gain_interval"][0] > 0:
            answers, gain, (low, high) = "all answers", probe["gain"], probe["gain_interval"]
    return f"{said} the score of {answers} by {gain:.2f} standard deviations ({low:.2f} to {high:.2f})."
