"""Compute the figures of `trl-ext prompts`, for its JSON and its page."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ...evaluation import SCRIPTS
from .examine import PromptReport
from .filtering import REASONS

QUANTILES = {"least": 0.0, "5 %": 0.05, "half": 0.5, "95 %": 0.95, "most": 1.0}


def figures(report: PromptReport, args: Any, reasons: dict[str, Any], splits: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of `prompts.json`, all but its `bounds` and `settings`."""
    found: dict[str, Any] = {"sets": {}, "shared": {}, "notes": []}
    for name, rows in report.sets.items():
        place, others = report.places[name], [other for other in report.sets if other != name]
        sizes = {"words": report.words[place], "characters": report.characters[place]}
        filled = report.filled(name)
        exact, near = (int(report.repeated(name, kind).sum()) for kind in ("exact", "near"))
        groups = report.duplicates.near[place]
        largest = int(np.unique(groups[filled], return_counts=True)[1].max()) if filled.any() else 0
        of_set: dict[str, Any] = {
            "rows": len(rows),
            "column": rows.column,
            "empty": int((~filled).sum()),
            "exact_duplicates": exact,
            "near_duplicates": near,
            "largest_group": largest,
            "joined_by_others": int((report.duplicates.similarity[place][filled] < args.threshold).sum()),
            "shared_exact": int(report.shared(name, others, "exact").sum()),
            "shared_near": int(report.shared(name, others, "near").sum()),
        }
        for unit, values in sizes.items():
            of_set[unit] = {label: float(np.quantile(values, share)) for label, share in QUANTILES.items()}
        scripts = np.bincount(report.scripts[place], minlength=len(SCRIPTS)) / len(rows)
        of_set["scripts"] = {SCRIPTS[i]: float(scripts[i]) for i in np.argsort(-scripts, kind="stable") if scripts[i]}
        of_set["languages"] = report.languages[name] if report.languages is not None else None
        if report.other_view is not None:
            of_set["same_in_the_other_view"] = _repeated_elsewhere(report, name)
        if name in report.copied:
            of_set["copied"] = {
                "answers": int((report.copied[name] > 0).sum()),
                "share": float((report.copied[name] > 0).mean()),
                "rows": np.flatnonzero(report.copied[name] > 0)[:1000].tolist(),
            }
        counts = np.bincount(reasons[name], minlength=len(REASONS))
        of_set["left_out"] = {why: int(count) for why, count in zip(REASONS[1:], counts[1:], strict=True)}
        of_set["kept"] = int(counts[0])
        if args.write:
            found["notes"] += _shared_in_copies(report, args, name, reasons[name] == REASONS.index(""))
        if name in splits:
            of_set["splits"] = {split: int((splits[name] == split).sum()) for split in args.split_shares}
            for split, count in of_set["splits"].items():
                if count < args.split_shares[split] * of_set["kept"] / 2:
                    found["notes"].append(
                        f"{split!r} of {name!r} has {count} of {of_set['kept']} rows, less than half of its share: "
                        "large groups of duplicates, and groups with rows of a set that is not split, go to the "
                        "largest split"
                    )
        found["sets"][name] = of_set
        found["shared"][name] = {
            other: {kind: int(report.shared(name, [other], kind).sum()) for kind in ("exact", "near")}
            for other in others
        }
    return found


def _shared_in_copies(report: PromptReport, args: Any, name: str, kept: np.ndarray) -> list[str]:
    """Return a list, with a note if the copy of a training set still has prompts that another set has, too."""
    if name in args.held_out:
        return []
    others = args.held_out or report.sets
    count = int((report.shared(name, others, "near") & kept).sum())
    why = (
        f"that held-out sets have, too, since `remove` is {args.remove}"
        if args.held_out
        else "that other sets have, too: name a set to evaluate on by `held_out`"
    )
    return [f"the copy of {name!r} keeps {count} rows {why}"] if count else []


def _repeated_elsewhere(report: PromptReport, name: str) -> int:
    """Count a set's rows that equal more rows by the value of `by` that was not chosen than by the one that was."""
    assert report.other_view is not None
    counts = np.bincount(report.other_view)[report.other_view]
    exact = report.duplicates.exact
    same = np.bincount(exact + 1)[exact + 1]
    place = report.places[name]
    return int(((counts > same) & (exact >= 0))[place].sum())


def broken_bounds(bounds: dict[str, dict[str, float]], found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return for each bound the share that was found, whether that breaks the bound, and a sentence that says so."""
    keys = {
        "max_overlap": ("shared_near", "have a duplicate in another set"),
        "max_duplicates": ("near_duplicates", "have a duplicate before them in the set"),
    }
    result = []
    for option, name, bound in ((option, *each) for option, chosen in bounds.items() for each in chosen.items()):
        of_set = found["sets"][name]
        if option != "max_copied":
            key, what = keys[option]
            count = of_set[key]
        elif "copied" in of_set:
            count, what = of_set["copied"]["answers"], "have an answer that repeats the corpus"
        else:
            raise ValueError(f"`max_copied` cannot apply to {name!r}: it has no answers, or is named in `copied_from`")
        share = count / of_set["rows"]
        said = f"{count} of {of_set['rows']} rows of {name!r} ({share:.2%}) {what}, the bound is {bound:.2%}"
        judged = {"bound": bound, "share": share, "broken": share > bound, "sentence": said}
        result.append({"option": option, "set": name, **judged})
    return result


def groups(report: PromptReport) -> Iterator[dict[str, Any]]:
    """Yield each group of duplicates: its kind, its rows by set, and the least similarity of a row to the first."""
    for _, places in large_groups(report):
        rows: dict[str, list[int]] = {}
        for name, row in rows_of(report, places):
            rows.setdefault(name, []).append(row)
        exact = bool((report.duplicates.exact[places] == report.duplicates.exact[places[0]]).all())
        least = float(report.duplicates.similarity[places].min())
        yield {"kind": "exact" if exact else "near", "similarity": round(least, 4), "rows": rows}


def large_groups(report: PromptReport) -> Iterator[tuple[int, np.ndarray]]:
    """Yield for each group of two or more near duplicates its number, and its rows' places in the report's arrays."""
    near = report.duplicates.near
    order = np.argsort(near, kind="stable")
    order = order[near[order] >= 0]
    for part in np.split(order, np.flatnonzero(np.diff(near[order])) + 1):
        if len(part) > 1:
            yield int(near[part[0]]), part


def rows_of(report: PromptReport, places: np.ndarray) -> list[tuple[str, int]]:
    """Return for each place in the report's arrays the name of its set, and the row in that set."""
    names = list(report.sets)
    begins = np.array([report.places[name].start for name in names])
    of = np.searchsorted(begins, places, side="right") - 1
    return [(names[i], int(place - begins[i])) for i, place in zip(of, places, strict=True)]
