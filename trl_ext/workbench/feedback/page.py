"""Write the pages of `trl-ext label` and `trl-ext constitution`."""

import json
from pathlib import Path
from typing import Any

from ...runs import write_text
from ..pages.markup import number, percent, render, shown_answer, shown_prompt
from .report import interval, shares

_TEXT = 400  # most characters of a critique that a page shows
_ROWS = 100  # most revisions that a page shows


def write_report(folder: Path, report: dict[str, Any]) -> None:
    """Write `label.json` and `label.html`."""
    write_text(folder / "label.json", json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    write_text(folder / "label.html", page(report))


def page(report: dict[str, Any]) -> str:
    """Return the HTML page of `trl-ext label`, made of the content of `label.json`."""
    by_name, judged = report.get("by_name", {}), report.get("judged")
    whole, pairs = by_name.get("overall"), report["pairs"] or {}
    return render(
        Path(__file__).with_name("page.html.j2"),
        title="Labels by a judge",
        verdict="" if report["gate"]["passed"] else "No pairs were written.",
        reasons=report["gate"]["reasons"],
        tiles={
            "judge": report["judge"],
            "rubric": report["rubric"],
            "constitution": report["constitution"] or "none",
            "κ with people": "–" if whole is None else interval(whole["kappa"], whole["kappa_interval"]),
            "κ that is needed": number(report["gate"]["min_agreement"]),
            "pairs by people": "–" if whole is None else whole["rows"],
            "all pairs": f"{report['rows']:,}",
            "pairs to train on": f"{pairs.get('train', 0):,}",
            "mean confidence": number(pairs.get("confidence"), 3),
        },
        by_name=[
            [
                name,
                interval(of["kappa"], of["kappa_interval"]),
                interval(of["alpha"], of["alpha_interval"]),
                percent(of["agreement"]),
                percent(of["winners"]["accuracy"]),
                percent(judged["by_name"][name]["ties"]) if judged else "–",
                shares(judged["by_name"][name]["shown_first"]) if judged else "–",
            ]
            for name, of in by_name.items()
        ],
        lengths=[
            [who, shares(of), of["count"]]
            for who, of in (
                *report.get("length", {}).items(),
                *((f"judge, {name}", of["longer"]) for name, of in by_name.items() if name != "overall"),
            )
        ],
        outcomes=[[why, f"{count:,}"] for why, count in (judged or {}).get("outcomes", {}).items()],
        people=report.get("people"),
        alpha=""
        if "people" not in report
        else interval(report["people"]["alpha"], report["people"]["alpha_interval"]),
        to_read=[
            [
                row["item"],
                shown_prompt(row["prompt"]),
                shown_answer(row["response_a"]),
                shown_answer(row["response_b"]),
                row["people"],
                f"{row['judge']} ({row['share']:.2f})" + (f": {row['why']}" if row["why"] else ""),
            ]
            for row in report.get("to_read", [])
        ],
        settings=report["settings"],
    )


def constitution_page(found: dict[str, Any], pairs: list[dict[str, Any]], principles: dict[str, str]) -> str:
    """
    Return the HTML page of `trl-ext constitution`.

    Args:
        found: content of `constitution.json`.
        pairs: rows with a revision as `chosen` and the first answer as `rejected`.
        principles: name → text of the principle.
    """
    of = found["by_principle"]
    return render(
        Path(__file__).with_name("constitution.html.j2"),
        title="Revised by a constitution",
        tiles={
            "model": found["model"],
            "constitution": found["constitution"],
            "prompts": f"{found['prompts']:,}",
            "rows for SFT": f"{found['sft']:,}",
            "pairs": f"{found['pairs']:,}",
            **{why: f"{count:,}" for why, count in found["left_out"].items()},
        },
        by_principle=[
            [name, text, *(number(of[name][key]) for key in ("revisions", "length_before", "length_after"))]
            for name, text in principles.items()
            if name in of
        ],
        outcomes=[[why, f"{count:,}"] for why, count in found["outcomes"].items()],
        rows=[
            [
                shown_prompt(pair["prompt"]),
                shown_answer(pair["rejected"]),
                pair["round"],
                pair["principle"],
                pair["critique"][:_TEXT],
                shown_answer(pair["chosen"]),
            ]
            for pair in pairs[:_ROWS]
        ],
        settings=found["settings"],
    )
