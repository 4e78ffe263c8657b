"""Write the page on annotators: their figures, open questions, and the pairs made from their labels."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..pages.charts import COLOURS, INK, can_draw, chart
from ..pages.markup import between, number, percent, render

_SHOWN = 200  # rows of a table
_NAMES = 40  # annotators whose names fit beside a chart
_FAST = 1 / 3  # share of the middle annotator's seconds; annotators who take less are named
_LEAN, _DRIFT = (0.05, 4), (-0.05, -3)  # share and z-score beyond which a lean, or a drift, is named


def page(report: dict[str, Any]) -> str:
    """Return the HTML page of a report that [`trl_ext.workbench.labels.command.report_labels`] returned."""
    compared = [row for row in report["annotators"] if row["compared"]]
    columns = _columns(report["annotators"])
    kappas = sorted(report["kappas"], key=lambda row: -2 if row["kappa"] is None else row["kappa"])
    return render(
        Path(__file__).with_name("page.html.j2"),
        title="Annotators",
        report=report,
        tiles=_tiles(report),
        findings=list(_findings(report)),
        has_charts=bool(compared),
        charts=[_agreement_chart(report, compared), _kappa_chart(report)] if compared and can_draw() else None,
        columns_of_people=columns,
        people=_people(report, columns),
        more=len(report["annotators"]) - _SHOWN,
        pairs=_pairs(report),
        kappas=[
            [*row["annotators"], f"{row['items']:,}", "–" if row["kappa"] is None else f"{row['kappa']:.3f}"]
            for row in kappas
        ],
    )


def _tiles(report: dict[str, Any]) -> dict[str, str]:
    return {
        "Krippendorff's α": number(report["alpha"], 3),
        "α, 95 % interval": between(report["alpha_interval"], ".3f") if report["alpha_interval"] else "–",
        "two labels agree": percent(report["agreement"]),
        "a coin would agree": percent(report["coin"]),
        "the same label always": percent(report["most_frequent"]),
        "ties": percent(report["ties"]),
        "answer shown first wins": percent(report["shown_first"]),
        "labels": f"{report['labels']:,}",
        "pairs of answers": f"{report['items']:,}",
        "labels a pair": number(report["labels_per_item"], 3),
        "annotators": f"{len(report['annotators']):,}",
        "left out": str(len(report["left_out_annotators"])),
    }


def _findings(report: dict[str, Any]) -> Iterator[str]:
    if report["left_out_annotators"]:
        bound, without = report["settings"]["min_zscore"], report["without_left_out"]
        yield (
            f"Left out, with a z-score below {bound:g}: {_some(report['left_out_annotators'])}. Without them α is "
            f"{number(without['alpha'], 3)}."
        )
    people = report["annotators"]
    if lean := [row for row in people if abs(row["lean"] or 0) > _LEAN[0] and abs(row["lean_z"] or 0) > _LEAN[1]]:
        shown = _some([f"{row['annotator']} ({row['lean']:+.0%})" for row in lean])
        yield f"Choose the answer shown first more often, or less often, than others on the same pairs: {shown}."
    if drift := [row for row in people if (row["drift"] or 0) < _DRIFT[0] and (row["drift_z"] or 0) < _DRIFT[1]]:
        shown = _some([f"{row['annotator']} ({row['drift']:+.0%})" for row in drift])
        yield f"Agree less in the later half of their labels: {shown}."
    seconds = [row["seconds"] for row in people if row["seconds"] is not None]
    middle = float(np.median(seconds or [0]))
    if fast := [row for row in people if row["seconds"] is not None and row["seconds"] < _FAST * middle]:
        shown = _some([f"{row['annotator']} ({row['seconds']:.3g} s)" for row in fast])
        yield f"Take less than a third of the median annotator's {middle:.3g} s: {shown}."
    if report["repeats"]:
        yield (
            f"{report['repeats']:,} labels repeat an earlier one by the same annotator on the same pair. Equal ones "
            f"count once. Those that contradict each other ({report['contradictions']:,} times) do not count."
        )
    if report["missing"]:
        yield f"{report['missing']:,} labels are missing, or have no annotator."
    if by := report["agreement_by_confidence"]:
        halves = " and ".join(f"{percent(share)} {name.replace('_', ' ')}" for name, share in by.items())
        yield f"Labels agree with the others', by how sure their annotator was: {halves}."


def _columns(people: list[dict[str, Any]]) -> list[str]:
    """Return the columns of the table of annotators: each figure that is known for some annotator."""
    has = {name for row in people for name, value in row.items() if value not in (None, 0)}
    if all(row["compared"] == row["labels"] for row in people):
        has.discard("compared")
    wanted = ["compared", "agreement", "z", "ties", "shown first", "lean", "seconds", "drift", "confidence", "repeats"]
    return ["labels", "share", *(name for name in wanted if name.replace(" ", "_") in has)]


def _people(report: dict[str, Any], columns: list[str]) -> list[list[str]]:
    rows = []
    for row in report["annotators"][:_SHOWN]:
        cells = {
            "share": percent(row["share"]),
            "agreement": percent(row["agreement"]),
            "z": "–" if row["z"] is None else f"{row['z']:+.1f}",
            "ties": percent(row["ties"]),
            "shown first": percent(row["shown_first"]),
            "lean": _signed(row["lean"], row["lean_z"]),
            "drift": _signed(row["drift"], row["drift_z"]),
        }
        rows.append([row["annotator"], *(cells.get(name) or number(row.get(name), 3) for name in columns)])
    return rows


def _agreement_chart(report: dict[str, Any], people: list[dict[str, Any]]) -> str:
    off = set(report["left_out_annotators"])
    people = sorted(people, key=lambda row: row["agreement"])

    def draw(axes: Any) -> None:
        share = np.array([row["agreement"] for row in people])
        error = 1.96 * np.sqrt(share * (1 - share) / np.array([row["compared"] for row in people]))
        places = np.arange(len(people))
        is_off = np.array([row["annotator"] in off for row in people])
        for mask, label, colour, mark in ((~is_off, "kept", COLOURS[0], "o"), (is_off, "left out", COLOURS[1], "X")):
            if mask.any():
                style = {"fmt": mark, "color": colour, "label": label, "linewidth": 1, "markersize": 4}
                axes.errorbar(share[mask], places[mask], xerr=error[mask], **style)
        for name, where, line in (("a coin", report["coin"], "--"), ("all pairs", report["agreement"], ":")):
            axes.axvline(where, color=INK, linestyle=line, linewidth=1, label=name)
        if len(people) <= _NAMES:
            size = 9 if len(people) <= 20 else 6
            axes.set_yticks(places, [str(row["annotator"])[:24] for row in people], fontsize=size)
        else:
            axes.set_yticks([])

    return chart("Agreement with the others", draw, xlabel="share of labels, with its 95 % interval")


def _kappa_chart(report: dict[str, Any]) -> str:
    names = list(dict.fromkeys(name for row in report["kappas"] for name in row["annotators"]))
    if len(names) < 3:
        return ""
    matrix = np.full((len(names), len(names)), np.nan)
    for row in report["kappas"]:
        i, j = (names.index(name) for name in row["annotators"])
        matrix[i, j] = matrix[j, i] = np.nan if row["kappa"] is None else row["kappa"]

    def draw(axes: Any) -> None:
        drawn = axes.pcolormesh(np.ma.masked_invalid(matrix), vmin=-1, vmax=1, cmap="RdBu")
        axes.figure.colorbar(drawn, ax=axes)
        shown = {"fontsize": 8 if len(names) <= 12 else 6}
        places = np.arange(len(names)) + 0.5
        axes.set_yticks(places, [name[:16] for name in names], **shown)
        axes.set_xticks(places, [name[:16] for name in names], rotation=90, **shown)
        if len(names) <= 8:
            for i, j in zip(*np.nonzero(np.isfinite(matrix)), strict=True):
                colour = "white" if abs(matrix[i, j]) > 0.5 else "black"
                where = {"ha": "center", "va": "center", "fontsize": 9, "color": colour}
                axes.text(j + 0.5, i + 0.5, f"{matrix[i, j]:.2f}", **where)

    return chart("Cohen's κ", draw, xlabel="")


def _pairs(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return for each file of pairs what the page shows of it: its tiles, what was left out, and examples."""
    return [
        {
            "title": f"{split}: {found['file'] or 'none'}",
            "tiles": {
                f"pairs to {split}": f"{found['pairs']:,}",
                "of pairs of answers": f"{found['items']:,}",
                "by annotators": len(found["annotators"]),
                "mean confidence": number(found["confidence"], 3),
            },
            "left_out": [[reason, f"{count:,}"] for reason, count in found["left_out"].items()],
            "examples": [
                [*(_short(pair[name]) for name in ("prompt", "chosen", "rejected")), number(pair["confidence"], 3)]
                for pair in found["examples"]
            ],
        }
        for split, found in report.get("pairs", {}).items()
    ]


def _some(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _short(value: Any) -> str:
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return shown if len(shown) <= 300 else f"{shown[:300]} …"


def _signed(value: float | None, z: float | None) -> str:
    if value is None:
        return "–"
    return f"{round(value, 2) + 0.0:+.0%}" + ("" if z is None else f" (z {z:+.1f})")
