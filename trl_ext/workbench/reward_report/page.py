"""Write the page of `trl-ext reward-report`."""

from pathlib import Path
from typing import Any

from ..pages.markup import between, number, render, with_interval
from .figures import accuracy_name

_VALUES = 50  # most groups of a column that are shown
_TEXT = 600  # most characters of a prompt or an answer that are shown


def page(report: dict[str, Any]) -> str:
    """Render as HTML the report that [`trl_ext.workbench.reward_report.figures.examine`] has returned."""
    said, bias, policy = report["verdict"], report["length_bias"], report["policy"]
    gaps = [(f"{row['from']:g} to {row['to']:g}", row) for row in report["accuracy_by_length_gap"]]
    suspicious = sum(probe["suspicious"] for probe in report["probes"])
    return render(
        Path(__file__).with_name("page.html.j2"),
        title="Reward report",
        report=report,
        broken=[reason for reason in said["reasons"] if reason not in said["not_judged"]],
        bounds=[f"{name} {bound:g}" for name, bound in report["bounds"].items() if bound is not None],
        tiles={
            accuracy_name(report): f"{report['accuracy']:.1%}",
            "95 % interval": between(report["accuracy_interval"]),
            "calibration error": number(report["calibration_error"], 3),
            "temperature": number(report["temperature"], 3),
            "length bias": with_interval(bias["bias"], None, "+.2f"),
            "suspicious probes": f"{suspicious} of {len(report['probes'])}" if report["probes"] else "–",
            "rank correlation": number(report["ranking"] and report["ranking"]["spearman"], 3),
            "best of n": with_interval(report["best_of_n"] and report["best_of_n"]["accuracy"], None),
            "policy above 99 % of training": with_interval(policy and policy["above_99_percent"], None),
        },
        sides=[[f"chosen {side}", *_counted(bias[side])] for side in ("longer", "shorter") if bias[side]["pairs"]],
        gaps=[[name, *_counted(row)] for name, row in gaps],
        groups={
            name: [[row["value"][:200], *_counted(row)] for row in rows[:_VALUES]]
            for name, rows in report["groups"].items()
        },
        reliability=[[f"{row['from']:.0%} to {row['to']:.0%}", *_counted(row)] for row in report["reliability"]],
        probes=[
            [
                {"name": probe["name"], "phrase": probe["phrase"]},
                {"word": probe["verdict"], "is_suspicious": probe["suspicious"], "why": probe["why"]},
                with_interval(probe["gain"], probe["gain_interval"], "+.2f"),
                with_interval(probe["gain_on_better"], probe["interval_on_better"], "+.2f"),
                with_interval(probe["over_control"], probe["control_interval"], "+.2f"),
                number(probe["rows"]),
            ]
            for probe in report["probes"]
        ],
        examples={
            f"{probe['name']}: {probe['phrase']}" if probe["phrase"] else probe["name"]: [
                [
                    *(each[name][:_TEXT] for name in ("prompt", "before", "after")),
                    f"{number(each['score_before'], 3)} → {number(each['score_after'], 3)}",
                ]
                for each in probe["examples"]
            ]
            for probe in report["probes"][:12]
        },
        scores=[
            [
                name,
                number(of["answers"]),
                *(
                    number(value, 3)
                    for value in (
                        of["mean"],
                        of["std"],
                        of["min"],
                        *(of["quantiles"][q] for q in ("0.05", "0.5", "0.95", "0.99")),
                        of["max"],
                    )
                ),
            ]
            for name, of in report["scores"].items()
        ],
        extremes={
            key: [
                [number(row["score"], 3), row["from"], row["prompt"][-_TEXT:], row["completion"][:_TEXT]]
                for row in report[key]
            ]
            for key in ("highest", "lowest")
        },
    )


def _counted(row: dict[str, Any]) -> list[str]:
    return [number(row["pairs"]), f"{row['accuracy']:.1%}", between(row["accuracy_interval"])]
