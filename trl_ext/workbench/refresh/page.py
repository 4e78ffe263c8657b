"""The page of a refreshed reward model: the old one and the new one side by side, and what people did not like."""

from typing import Any

from ..pages.markup import Markup, document, html, number


def page(report: dict[str, Any]) -> str:
    """The HTML of a report as `recipes/refresh_reward.py` writes it into `refresh.json`."""
    pairs = report["pairs"]
    shown = {"round": str(report["round"]), "labels": f"{pairs['labels']:,}", "pairs labelled": f"{pairs['items']:,}"}
    shown |= {"new pairs trained on": f"{report['training']['new']:,}", "old ones": f"{report['training']['old']:,}"}
    parts = [
        html.tiles(shown),
        html.section(f"Old and new, on {_pairs(report)}", _models(report)),
        html.section("How often queued answers won", _wins(report)),
        html.section("Highest scores that lost", _lost(report)),
    ]
    return document(f"Reward model, refreshed: round {report['round']}", parts)


def _models(report: dict[str, Any]) -> str:
    columns = [(_pairs(report), "short"), ("number", "number")]
    columns += [(f"{name}, {which} model", "number") for name in ("accuracy", "ECE") for which in ("old", "new")]
    rows = []
    for name, old in report["old"].items():
        if isinstance(old, dict):
            both = [old, report["new"][name]]
            accuracy = [
                "{:.1%} ({:.1%} to {:.1%})".format(each["accuracy"], *each["accuracy_interval"]) for each in both
            ]
            errors = [number(each["calibration_error"], 3) for each in both]
            rows.append([name, str(old["pairs"]), *accuracy, *errors])
    said = [*report.get("said", []), "Intervals are bootstraps over pairs, 95 %. ECE is the calibration error."]
    return html.table(columns, rows) + Markup().join(html.note(sentence) for sentence in said)


def _pairs(report: dict[str, Any]) -> str:
    """What the pairs are called: held-out only where it is known that no model was trained on them."""
    return "held-out pairs" if report.get("is_held_out") else "pairs"


def _wins(report: dict[str, Any]) -> str:
    rows = [[why, str(each["pairs"]), f"{each['won']:.0%}"] for why, each in report["won"].items()]
    columns = [("queued for", "short"), ("pairs", "number"), ("won against the other answer", "number")]
    said = "An answer that was queued for its score, and loses, is one that the old model was wrong about."
    return html.table(columns, rows) + html.note(said)


def _lost(report: dict[str, Any]) -> str:
    columns = [("score", "number"), ("prompt", "text"), ("the answer", "text"), ("what was preferred to it", "text")]
    names = ("prompt", "answer", "preferred")
    rows = [[number(row["score"], 3), *(row[name] for name in names)] for row in report["lost"]]
    return html.table(columns, rows) if rows else html.note("None.")
