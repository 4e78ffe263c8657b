"""Write the page of `trl-ext reward-report`."""

from pathlib import Path
from typing import Any

from ..pages.charts import COLOURS, INK, can_draw, chart
from ..pages.markup import between, number, render, with_interval
from .figures import SIDES, accuracy_name

_VALUES = 50  # most groups of a column that are shown
_EXAMPLES = 2  # most examples of a probe that are shown
_TEXT = 600  # most characters of a prompt or an answer that are shown
_SETS = {  # colour and line of each set of scores
    "training chosen": (COLOURS[0], "-"),
    "training rejected": (COLOURS[1], "-"),
    "held-out chosen": (COLOURS[0], ":"),
    "held-out rejected": (COLOURS[1], ":"),
    "policy": (COLOURS[2], "-"),
}


def page(report: dict[str, Any]) -> str:
    """Render as HTML the report that [`trl_ext.workbench.reward_report.figures.examine`] has returned."""
    verdict = report["verdict"]
    groups = report["groups"].items()
    gaps = [(f"{row['from']:g} to {row['to']:g}", row) for row in report["accuracy_by_length_gap"]]
    return render(
        Path(__file__).with_name("page.html.j2"),
        title="Reward report",
        report=report,
        pairs="held-out pairs" if report["trained_on"]["is_known"] else "pairs",
        broken=[reason for reason in verdict["reasons"] if reason not in verdict["not_judged"]],
        bounds=[f"{name} {bound:g}" for name, bound in report["bounds"].items() if bound is not None],
        tiles=_tiles(report),
        accuracy_charts=_accuracy_charts(report, gaps) if can_draw() else None,
        sides=[
            [f"chosen {side}", *_counted(report["length_bias"][side])]
            for side in SIDES
            if report["length_bias"][side]["pairs"]
        ],
        bias=_length_bias(report),
        gaps=[[name, *_counted(row)] for name, row in gaps],
        groups={name: [[row["value"][:200], *_counted(row)] for row in rows[:_VALUES]] for name, rows in groups},
        more={name: len(rows) - _VALUES for name, rows in groups},
        calibration_charts=_calibration_charts(report) if can_draw() else None,
        probes=[_probe(probe) for probe in report["probes"]],
        examples=[_examples(probe) for probe in [probe for probe in report["probes"] if probe["rows"]][:12]],
        score_charts=[_score_chart(report)] if can_draw() else None,
        scores=_scores(report),
        compared_with=_shown(report, report["policy"]["compared_with"]) if report["policy"] else "",
        correlations=_correlations(report),
        extremes={title: _extremes(report, key) for title, key in (("Highest", "highest"), ("Lowest", "lowest"))},
    )


def _tiles(report: dict[str, Any]) -> dict[str, str]:
    ranking, best, policy = report["ranking"], report["best_of_n"], report["policy"]
    suspicious = sum(bool(probe.get("suspicious")) for probe in report["probes"])
    open_ones = sum(probe["verdict"] == "not judged" for probe in report["probes"])
    bias = report["length_bias"]["bias"]
    return {
        accuracy_name(report): f"{report['accuracy']:.1%}",
        "95 % interval": between(report["accuracy_interval"]),
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


def _accuracy_charts(report: dict[str, Any], gaps: list[tuple[str, dict[str, Any]]]) -> list[str]:
    charts = [_shares(f"by length gap, {report['length_unit']}", gaps)]
    for name, rows in report["groups"].items():
        if 1 < len(rows) <= 12:
            charts.append(_shares(f"accuracy by {name}", [(row["value"][:24], row) for row in rows]))
    return charts


def _length_bias(report: dict[str, Any]) -> dict[str, Any]:
    """
    Describe the length bias in the words of the page.

    Returns:
        `side`: "longer" or "shorter", which answers the model prefers; `share`: in how many pairs it would prefer them
        if people preferred both alike; `bound`: the bound, or None; `state`: "broken", "not broken" or "not judged".
        Empty if the bias is not known.
    """
    found, bound = report["length_bias"], report["bounds"]["max_length_bias"]
    if found["bias"] is None:
        return {}
    is_sure = not found["interval"][0] <= 0 <= found["interval"][1]
    state = "not broken" if bound is None or abs(found["bias"]) <= bound else "broken" if is_sure else "not judged"
    side = "longer" if found["bias"] >= 0 else "shorter"
    return {"side": side, "share": (1 + abs(found["bias"])) / 2, "bound": bound, "state": state}


def _counted(row: dict[str, Any]) -> list[str]:
    return [number(row["pairs"]), f"{row['accuracy']:.1%}", between(row["accuracy_interval"])]


def _shares(title: str, rows: list[tuple[str, dict[str, Any]]]) -> str:
    """Draw the accuracy of each row as a point, and its interval as a line, the rows one below the other."""

    def draw(axes: Any) -> None:
        for place, (_, row) in enumerate(rows):
            low, high = row["accuracy_interval"]
            axes.plot([low, high], [place, place], color=COLOURS[0])
            axes.plot([row["accuracy"]], [place], "o", color=COLOURS[0])
        axes.axvline(0.5, color=INK, linewidth=1, linestyle=":")
        axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=9)
        axes.set_ylim(len(rows) - 0.5, -0.5)

    return chart(title, draw, xlabel="accuracy")


def _calibration_charts(report: dict[str, Any]) -> list[str]:
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

    return [
        chart("reliability", draw, xlabel="confidence of the model"),
        chart("pairs by confidence", sizes, xlabel="confidence of the model"),
    ]


def _shown(report: dict[str, Any], name: str) -> str:
    """
    Return the name to show for a set of answers: "held-out" becomes "given" if not all training pairs are known.
    """
    return name if report["trained_on"]["is_known"] else name.replace("held-out", "given")


def _score_chart(report: dict[str, Any]) -> str:
    edges, sets = report["histogram_edges"], report["scores"]

    def draw(axes: Any) -> None:
        for name, found in sets.items():
            colour, line = _SETS[name]
            shares = [count / found["answers"] for count in found["histogram"]]
            axes.stairs(shares, edges, color=colour, linestyle=line, label=_shown(report, name), linewidth=1.5)
        axes.set_ylabel("share of answers")

    return chart("scores", draw, xlabel="score")


def _scores(report: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name, found in report["scores"].items():
        quantiles = (found["quantiles"][each] for each in ("0.05", "0.5", "0.95", "0.99"))
        values = [found["mean"], found["std"], found["min"], *quantiles, found["max"]]
        rows.append([_shown(report, name), number(found["answers"]), *(number(value, 3) for value in values)])
    return rows


def _probe(probe: dict[str, Any]) -> list[Any]:
    return [
        {"name": probe["name"], "phrase": probe.get("phrase")},
        {"word": probe["verdict"], "is_suspicious": probe["suspicious"], "why": probe["why"]},
        _gain(probe["gain"], probe["gain_interval"]),
        _gain(probe["gain_on_better"], probe["interval_on_better"]),
        _gain(probe["over_control"], probe["control_interval"]),
        number(probe["rows"]),
    ]


def _examples(probe: dict[str, Any]) -> dict[str, Any]:
    rows = []
    for each in probe["examples"][:_EXAMPLES]:
        texts = (str(each[name])[:_TEXT] for name in ("prompt", "before", "after"))
        rows.append([*texts, f"{number(each['score_before'], 3)} → {number(each['score_after'], 3)}"])
    title = f"{probe['name']}: {probe['phrase']}" if probe.get("phrase") else probe["name"]
    return {"title": title, "is_open": probe["suspicious"], "rows": rows}


def _gain(value: float | None, interval: list[float] | None) -> str:
    return with_interval(value if interval else None, interval, "+.2f")


def _correlations(report: dict[str, Any]) -> list[list[str]]:
    if (ranking := report["ranking"]) is None:
        return []
    return [
        [name, number(ranking[key], 3), between(ranking[f"{key}_interval"], ".3f")]
        for name, key in (("Spearman's ρ", "spearman"), ("Kendall's τ-b", "kendall"))
    ]


def _extremes(report: dict[str, Any], key: str) -> list[list[str]]:
    return [
        [number(row["score"], 3), _shown(report, row["from"]), row["prompt"][-_TEXT:], row["completion"][:_TEXT]]
        for row in report[key]
    ]
