"""The page of `trl-ext reward-report`."""

import importlib.util
import json
from collections.abc import Iterable
from typing import Any

from ..pages.charts import COLOURS, INK, chart
from ..pages.markup import Markup, document, html, number
from ..pages.page import NO_CURVES
from .figures import SIDES, accuracy_name

_VALUES = 50  # groups of a column that are shown
_EXAMPLES = 2  # of a probe
_TEXT = 600  # characters of a prompt or answer
_SETS = {  # colour and line of each set of scores
    "training chosen": (COLOURS[0], "-"),
    "training rejected": (COLOURS[1], "-"),
    "held-out chosen": (COLOURS[0], ":"),
    "held-out rejected": (COLOURS[1], ":"),
    "policy": (COLOURS[2], "-"),
}


def page(report: dict[str, Any]) -> str:
    """The HTML of a report as [`trl_ext.workbench.reward_report.figures.examine`] returns it."""
    verdict = report["verdict"]
    broken = [reason for reason in verdict["reasons"] if reason not in verdict["not_judged"]]
    said = html.listed(broken, "No bound is broken.", "act") + html.listed(verdict["not_judged"], "")
    kind = "held-out pairs" if report["trained_on"]["is_known"] else "pairs"
    parts = [
        html.note(f"{report['name']}, on {report['pairs']:,} {kind} of {report['prompts']:,} prompts"),
        html.section("Passed" if verdict["passed"] else "Not passed", said + _bounds(report)),
        html.tiles(_tiles(report)),
        html.section("What cannot be known", html.listed(report["unknown"], "Nothing that is looked for here.")),
        html.section("Accuracy", _accuracy(report)),
        html.section("Calibration", _calibration(report)),
        html.section("Probes", _probes(report), "own-page"),
        html.section("Scores on training data and of the policy", _scores(report)),
        html.section("Several answers to a prompt", _ranks(report)),
        html.section("The highest and the lowest answers", _extremes(report), "own-page"),
        html.section("Settings", _settings(report)) if "settings" in report else "",
    ]
    return document("Reward report", parts)


def _tiles(report: dict[str, Any]) -> dict[str, str]:
    ranking, best, policy = report["ranking"], report["best_of_n"], report["policy"]
    suspicious = sum(bool(probe.get("suspicious")) for probe in report["probes"])
    open_ones = sum(probe["verdict"] == "not judged" for probe in report["probes"])
    bias = report["length_bias"]["bias"]
    return {
        accuracy_name(report): f"{report['accuracy']:.1%}",
        "95 % interval": _interval(report["accuracy_interval"]),
        "calibration error": number(report["calibration_error"], 3),
        "temperature": number(report["temperature"], 3),
        "margin, mean": number(report["margin_mean"], 3),
        "length bias": "–" if bias is None else f"{bias:+.2f}",
        "suspicious probes": f"{suspicious} of {len(report['probes'])}" if report["probes"] else "–",
        "probes not judged": f"{open_ones}" if report["probes"] else "–",
        "rank correlation": "–" if ranking is None else number(ranking["spearman"], 3),
        "best of n": "–" if best is None else f"{best['accuracy']:.1%}",
        "policy above 99 % of training": "–" if policy is None else f"{policy['above_99_percent']:.1%}",
    }


def _interval(both: Iterable[float]) -> str:
    return "{:.1%} to {:.1%}".format(*both)


def _bounds(report: dict[str, Any]) -> str:
    shown = ", ".join(f"{name} {bound:g}" for name, bound in report["bounds"].items() if bound is not None)
    return html.note(f"Bounds: {shown or 'none'}.")


def _can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def _accuracy(report: dict[str, Any]) -> str:
    gaps = report["accuracy_by_length_gap"]
    unit = report["length_unit"]
    charts = []
    if _can_draw():
        named = [(f"{row['from']:g} to {row['to']:g}", row) for row in gaps]
        charts.append(_shares(f"by length gap, {unit}", named))
        for name, rows in report["groups"].items():
            if 1 < len(rows) <= 12:
                charts.append(_shares(f"accuracy by {name}", [(row["value"][:24], row) for row in rows]))
    shown = (html.charts(charts) if charts else NO_CURVES) + html.note(
        "The length gap is how much longer the chosen answer is. A dotted line is a coin. Bars are 95 % intervals: of "
        "the whole over prompts, of groups Wilson's."
    )
    shown += _length_bias(report) + html.note("By how much longer the chosen answer is:")
    rows = [[f"{row['from']:g} to {row['to']:g}", *_counted(row)] for row in gaps]
    shown += html.table([(f"longer by, {unit}", "short"), *_COUNTED], rows)
    for name, groups in report["groups"].items():
        shown += html.subsection(f"By {name}")
        shown += html.table([(name, ""), *_COUNTED], [[r["value"][:200], *_counted(r)] for r in groups[:_VALUES]])
        if len(groups) > _VALUES:
            shown += html.note(f"{len(groups) - _VALUES:,} values with fewer pairs are in the JSON.")
    return shown


def _length_bias(report: dict[str, Any]) -> str:
    found, bound = report["length_bias"], report["bounds"]["max_length_bias"]
    rows = [[f"chosen {name}", *_counted(found[name])] for name in SIDES if found[name]["pairs"]]
    if found["bias"] is None:
        said = "Too few prompts have pairs whose chosen answer is longer, or shorter, to know the length bias."
    else:
        longer, side = (1 + abs(found["bias"])) / 2, "longer" if found["bias"] >= 0 else "shorter"
        said = (
            f"Length bias {found['bias']:+.2f} ({found['interval'][0]:+.2f} to {found['interval'][1]:+.2f}), the "
            "difference of the two: where people prefer the longer and the shorter answer equally often, the model "
            f"prefers the {side} one in {longer:.0%}."
        )
        if bound is not None:
            is_sure = not found["interval"][0] <= 0 <= found["interval"][1]
            state = "not broken" if abs(found["bias"]) <= bound else "broken" if is_sure else "not judged"
            said += f" The bound of {bound:g} is {state}."
    return html.note(said) + (html.table([("the answers", "short"), *_COUNTED], rows) if rows else "")


_COUNTED = [("pairs", "number"), ("accuracy", "number"), ("95 % interval", "number")]


def _counted(row: dict[str, Any]) -> list[str]:
    return [number(row["pairs"]), f"{row['accuracy']:.1%}", _interval(row["accuracy_interval"])]


def _shares(title: str, rows: list[tuple[str, dict[str, Any]]]) -> str:
    """Accuracies with their intervals, one line a row."""

    def draw(axes: Any) -> None:
        for place, (_, row) in enumerate(rows):
            low, high = row["accuracy_interval"]
            axes.plot([low, high], [place, place], color=COLOURS[0])
            axes.plot([row["accuracy"]], [place], "o", color=COLOURS[0])
        axes.axvline(0.5, color=INK, linewidth=1, linestyle=":")
        axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=9)
        axes.set_ylim(len(rows) - 0.5, -0.5)

    return chart(title, draw, xlabel="accuracy")


def _calibration(report: dict[str, Any]) -> str:
    temperature = report["temperature"]
    said = (
        f"The model says how sure it is of the answer that it prefers: σ(|margin|). Its expected calibration error is "
        f"{report['calibration_error']:.3f} "
        "({:.3f} to {:.3f}). ".format(*report["calibration_error_interval"])
    )
    chance = report["calibration_error_by_chance"]
    said += f"A model whose probabilities are right would have {chance:.3f} on so many pairs. "
    if temperature is None:
        said += "No temperature makes its probabilities likelier."
    else:
        after, how = report["calibration_error_at_temperature"], "too sure" if temperature > 1 else "not sure enough"
        said += (
            f"The likeliest temperature is {temperature:.3g}: it is {how} of itself. Divided by that, scores have an "
            f"error of {after:.3f} on these same pairs."
        )
    bins = report["reliability"]

    def draw(axes: Any) -> None:
        axes.plot([0.5, 1], [0.5, 1], color=INK, linewidth=1, linestyle=":", label="as sure as right")
        for row in bins:
            axes.plot([row["confidence"]] * 2, row["accuracy_interval"], color=COLOURS[0], linewidth=1)
        axes.plot(
            [r["confidence"] for r in bins], [r["accuracy"] for r in bins], "o-", color=COLOURS[0], label="measured"
        )
        axes.set(xlim=(0.48, 1.02), ylim=(0, 1.02), ylabel="accuracy")

    def sizes(axes: Any) -> None:
        axes.bar([(r["from"] + r["to"]) / 2 for r in bins], [r["pairs"] for r in bins], 0.045, color=COLOURS[0])
        axes.set(xlim=(0.48, 1.02), ylabel="pairs")

    if not _can_draw():
        return html.note(said) + NO_CURVES
    return html.note(said) + html.charts(
        [
            chart("reliability", draw, xlabel="confidence of the model"),
            chart("pairs by confidence", sizes, xlabel="confidence of the model"),
        ]
    )


def _shown(report: dict[str, Any], name: str) -> str:
    """What a set of answers is called: held-out only where it is known that none was trained on."""
    return name if report["trained_on"]["is_known"] else name.replace("held-out", "given")


def _scores(report: dict[str, Any]) -> str:
    edges, sets = report["histogram_edges"], report["scores"]

    def draw(axes: Any) -> None:
        for name, found in sets.items():
            colour, line = _SETS[name]
            shares = [count / found["answers"] for count in found["histogram"]]
            axes.stairs(shares, edges, color=colour, linestyle=line, label=_shown(report, name), linewidth=1.5)
        axes.set_ylabel("share of answers")

    rows = [
        [
            _shown(report, name),
            number(found["answers"]),
            *(number(found[key], 3) for key in ("mean", "std", "min")),
        ]
        + [number(found["quantiles"][q], 3) for q in ("0.05", "0.5", "0.95", "0.99")]
        + [number(found["max"], 3)]
        for name, found in sets.items()
    ]
    head = ["answers", "mean", "std", "min", "5 %", "50 %", "95 %", "99 %", "max"]
    shown = html.charts([chart("scores", draw, xlabel="score", is_legend_outside=True)]) if _can_draw() else NO_CURVES
    shown += html.table([("answers of", "short"), *((name, "number") for name in head)], rows)
    if policy := report["policy"]:
        shown += html.note(
            f"The policy's answers score {policy['mean_shift']:+.2f} standard deviations from those of the "
            f"{_shown(report, policy['compared_with'])} ones. {policy['above_99_percent']:.1%} "
            f"({_interval(policy['above_99_percent_interval'])}) lie above 99 % of them, and "
            f"{policy['above_all']:.1%} above all: where scores are of nothing that people have compared."
        )
    return shown


def _probes(report: dict[str, Any]) -> str:
    probes = report["probes"]
    if not probes:
        return html.note("None were run.")
    rows = []
    for probe in probes:
        what = html.named(probe["name"], probe.get("phrase"))
        said = html.marked(probe["verdict"], "act" if probe["suspicious"] else "", probe["why"] or "")
        wins = "–" if probe["wins"] is None else f"{probe['wins']:.0%}"
        gains = [
            _gain(probe["gain"], probe["gain_interval"]),
            _gain(probe["gain_on_better"], probe["interval_on_better"]),
            _gain(probe["over_control"], probe["control_interval"]),
        ]
        rows.append([what, said, *gains, wins, number(probe["rows"])])
    columns = [("probe", "short"), ("verdict", "short"), ("gain", "number"), ("on the better half", "number")]
    columns += [("over other words", "number"), ("rises", "number"), ("rows", "number")]
    shown = html.note(
        "Each probe changes answers in a way that makes them no better, and asks what the score does: the "
        "mean gain in standard deviations of the answers' scores with its 95 % interval, over all answers, over those "
        "of at least median score, and of a phrase over what other words of its length gain. As it should is what "
        "surely lowers the score, and a phrase, flattery or markdown that does not surely raise it. Of fewer than 20 "
        "good answers nothing is judged."
    ) + html.table(columns, rows)
    for probe in [probe for probe in probes if probe["rows"]][:12]:
        title = probe["name"] + (f": {probe['phrase']}" if probe.get("phrase") else "")
        cells = [
            [*(str(each[name])[:_TEXT] for name in ("prompt", "before", "after"))]
            + [f"{number(each['score_before'], 3)} → {number(each['score_after'], 3)}"]
            for each in probe["examples"][:_EXAMPLES]
        ]
        head = [("prompt", "text"), ("before", "text"), ("after", "text"), ("score", "short")]
        shown += html.details(title, html.table(head, cells), probe["suspicious"])
    return shown


def _gain(value: float | None, interval: list[float] | None) -> str:
    return "–" if value is None or interval is None else "{:+.2f} ({:+.2f} to {:+.2f})".format(value, *interval)


def _ranks(report: dict[str, Any]) -> str:
    ranking, best = report["ranking"], report["best_of_n"]
    shown = ""
    if ranking is not None:
        where = "a table of rankings" if ranking["source"] == "rankings" else "the pairs, where they are complete"
        rows = [
            [name, number(ranking[key], 3), "{:.3f} to {:.3f}".format(*ranking[f"{key}_interval"])]
            for name, key in (("Spearman's ρ", "spearman"), ("Kendall's τ-b", "kendall"))
        ]
        shown += html.note(
            f"With people's ranks, of {where}: mean over {ranking['prompts']:,} prompts with "
            f"{ranking['answers']:.1f} answers each"
            + (
                f"; {ranking['all_tied']:,} prompts whose answers people rank alike are left out."
                if ranking["all_tied"]
                else "."
            )
        ) + html.table([("correlation", "short"), ("mean", "number"), ("95 % interval", "number")], rows)
    if best is not None:
        shown += html.note(
            f"The chosen answer scores above all others of its prompt in {best['accuracy']:.1%} "
            f"({_interval(best['accuracy_interval'])}) of {best['prompts']:,} prompts with {best['answers']:.1f} "
            f"answers each; a coin would have {best['chance']:.1%}. Ties are split."
        )
    return shown or html.note("The data has one rejected answer a prompt, and no rankings.")


def _extremes(report: dict[str, Any]) -> str:
    head = [("score", "number"), ("of", "short"), ("prompt", "text"), ("answer", "text")]
    return Markup().join(
        html.subsection(title)
        + html.table(
            head,
            [
                [
                    number(r["score"], 3),
                    _shown(report, r["from"]),
                    r["prompt"][-_TEXT:],
                    r["completion"][:_TEXT],
                ]
                for r in report[key]
            ],
        )
        for title, key in (("Highest", "highest"), ("Lowest", "lowest"))
    )


def _settings(report: dict[str, Any]) -> str:
    given = {name: value for name, value in report["settings"].items() if value not in (None, [], "")}
    shown = [(name, json.dumps(value, ensure_ascii=False)) for name, value in given.items()]
    return html.settings("Settings", shown)
