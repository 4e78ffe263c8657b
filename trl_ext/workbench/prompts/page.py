"""Compute the figures of `trl-ext prompts`, and write them on its page."""

from pathlib import Path
from typing import Any

import numpy as np

from ..pages.markup import number, render
from .examine import REASONS, PromptReport

QUANTILES = {"least": 0.0, "5 %": 0.05, "half": 0.5, "95 %": 0.95, "most": 1.0}
EXAMPLES = 8
_SHOWN = 400  # characters of a prompt
_BOUNDS = {
    "max_overlap": ("shared_near", "have a duplicate in another set"),
    "max_duplicates": ("near_duplicates", "have a duplicate before them in the set"),
    "max_copied": ("copied", "have an answer that repeats the corpus"),
}


def figures(report: PromptReport, args: Any, reasons: dict[str, Any], splits: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of `prompts.json`, all but its `settings`."""
    found: dict[str, Any] = {"sets": {}, "shared": {}, "notes": [], "bounds": []}
    for name, rows in report.sets.items():
        place, others = report.places[name], [other for other in report.sets if other != name]
        scripts, counts = np.unique(report.scripts[place], return_counts=True)
        of_set: dict[str, Any] = {
            "rows": len(rows),
            "column": rows.column,
            "empty": int((report.duplicates.exact[place] < 0).sum()),
            "exact_duplicates": int(report.repeated(name, "exact").sum()),
            "near_duplicates": int(report.repeated(name, "near").sum()),
            "shared_near": int(report.shared(name, others, "near").sum()),
            "words": {label: float(np.quantile(report.words[place], q)) for label, q in QUANTILES.items()},
            "scripts": {str(scripts[i]): float(counts[i] / len(rows)) for i in np.argsort(-counts, kind="stable")},
            "languages": report.languages and report.languages[name],
            "left_out": {why: int((reasons[name] == why).sum()) for why in REASONS},
            "kept": int((reasons[name] == "").sum()),
        }
        if name in report.copied:
            of_set["copied"] = int((report.copied[name] > 0).sum())
        if name in splits:
            of_set["splits"] = {split: int((splits[name] == split).sum()) for split in args.split_shares}
        found["sets"][name] = of_set
        found["shared"][name] = {
            other: {kind: int(report.shared(name, [other], kind).sum()) for kind in ("exact", "near")}
            for other in others
        }
        leaks = report.shared(name, args.held_out or others, "near") & (reasons[name] == "")
        if args.write and name not in args.held_out and leaks.any():
            found["notes"].append(
                f"the copy of {name!r} keeps {leaks.sum()} rows that {'held-out' if args.held_out else 'other'} sets "
                "have, too: see `held_out` and `remove`"
            )
    for option, name, bound in ((option, *each) for option, of in args.bounds.items() for each in of.items()):
        key, what = _BOUNDS[option]
        count, rows = found["sets"][name][key], found["sets"][name]["rows"]
        sentence = f"{count} of {rows} rows of {name!r} ({count / rows:.2%}) {what}, the bound is {bound:.2%}"
        judged = {"bound": bound, "share": count / rows, "broken": count / rows > bound, "sentence": sentence}
        found["bounds"].append({"option": option, "set": name, **judged})
    return found


def groups(report: PromptReport) -> list[dict[str, Any]]:
    """Return each group of duplicates: its kind, its rows by set, and the least similarity of a row to the first."""
    near, exact, found = report.duplicates.near, report.duplicates.exact, []
    order = np.argsort(near, kind="stable")
    for places in np.split(order, np.flatnonzero(np.diff(near[order])) + 1):
        if len(places) > 1 and near[places[0]] >= 0:
            inside = {name: places[(places >= of.start) & (places < of.stop)] for name, of in report.places.items()}
            rows = {name: (own - report.places[name].start).tolist() for name, own in inside.items() if len(own)}
            kind = "exact" if (exact[places] == exact[places[0]]).all() else "near"
            least = round(float(report.duplicates.similarity[places].min()), 4)
            found.append({"kind": kind, "similarity": least, "rows": rows})
    return found


def page(report: PromptReport, found: dict[str, Any], grouped: list[dict[str, Any]], args: Any) -> str:
    """Return the HTML page of a report on prompts, with its figures `found` and its groups of duplicates."""
    sets, guessed = found["sets"], report.languages is not None
    rows, repeated = (sum(of[key] for of in sets.values()) for key in ("rows", "near_duplicates"))
    tiles = {"rows": number(rows), "near duplicates within sets": f"{repeated / rows:.1%}"}
    tiles |= {f"{name} shared with others": number(sets[name]["shared_near"]) for name in args.held_out}

    def shares(values: dict[str, float]) -> str:
        return ", ".join(f"{name or 'too short to say'} {share:.1%}" for name, share in [*values.items()][:12])

    def between(name: str, other: str) -> str:
        if name == other:
            return "–"
        counts = found["shared"][name][other]
        return f"{number(counts['near'])} ({counts['near'] / sets[name]['rows']:.1%}), exact {number(counts['exact'])}"

    return render(
        Path(__file__).with_name("page.html.j2"),
        title="Prompts",
        args=args,
        tiles=tiles,
        bounds=[[b["broken"], f"{b['option']} {b['set']}", b["sentence"]] for b in found["bounds"]],
        sets_above=[f"in {name}" for name in sets],
        between=[[name, *(between(name, other) for other in sets)] for name in sets],
        examples=_examples(report, grouped, args),
        quantiles=list(QUANTILES),
        lengths=[[name, *map(number, of["words"].values())] for name, of in sets.items()],
        guessed=guessed,
        scripts=[
            [name, shares(of["scripts"]), *([shares(of["languages"])] if guessed else [])] for name, of in sets.items()
        ],
        copied=[
            [name, number(sets[name]["copied"]), f"row {np.argmax(own)}: {own.max():.0%} of its runs"]
            for name, own in report.copied.items()
        ],
        reasons=REASONS,
        kept=[
            [
                name,
                of["column"],
                *map(number, (of["rows"], of["exact_duplicates"], of["near_duplicates"])),
                *map(number, (*of["left_out"].values(), of["kept"])),
                ", ".join(f"{split} {number(count)}" for split, count in of.get("splits", {}).items()) or "–",
            ]
            for name, of in sets.items()
        ],
        notes=found["notes"],
    )


def _examples(report: PromptReport, grouped: list[dict[str, Any]], args: Any) -> list[list[Any]]:
    """Return two prompts of each of 8 groups: first groups over several sets, with held-out ones, and large ones."""

    def order(group: dict[str, Any]) -> tuple:
        rows = group["rows"]
        return len(rows) == 1, not {*rows} & {*args.held_out}, group["kind"] == "exact", -sum(map(len, rows.values()))

    found = []
    for group in sorted(grouped, key=order)[:EXAMPLES]:
        rows = [(name, row) for name, of in group["rows"].items() for row in of]
        first, *others = sorted(rows, key=lambda row: row[0] not in args.held_out)
        pair = first, next((row for row in others if row[0] != first[0]), others[0])
        cells = [
            {"place": f"{name} {row}", "text": report.sets[name].prompt(row, args.by)[:_SHOWN]} for name, row in pair
        ]
        found.append([number(len(rows)), number(group["similarity"], 3), *cells])
    return found
