"""Write the page of `trl-ext prompts`."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from ...evaluation import SCRIPTS, similarity_of
from ..pages.charts import COLOURS, LINES, can_draw, chart
from ..pages.markup import number, render
from .examine import PromptReport
from .figures import QUANTILES, large_groups, rows_of
from .filtering import REASONS, strata

EXAMPLES = 8
_COUNTS = {  # a column of the table of counts → its key in the figures
    "rows": "rows",
    "empty": "empty",
    "exact": "exact_duplicates",
    "near": "near_duplicates",
    "largest group": "largest_group",
    "joined by others": "joined_by_others",
}
_LOOKED_AT = 50  # rows of a group that are compared to find an example
_SHOWN = 400  # characters of a prompt


def page(report: PromptReport, found: dict[str, Any], args: Any, splits: dict[str, Any]) -> str:
    """Return the HTML page of a report on prompts, with its figures `found` and the `splits` of the copies."""
    sets, guessed = found["sets"], report.languages is not None
    rows = sum(of_set["rows"] for of_set in sets.values())
    repeated = sum(of_set["near_duplicates"] for of_set in sets.values())
    shown = {"rows": number(rows), "near duplicates within sets": f"{repeated / rows:.1%}"}
    shown |= {f"{name} shared with others": number(sets[name]["shared_near"]) for name in args.held_out}
    if found["bounds"]:
        shown["bounds broken"] = f"{sum(bound['broken'] for bound in found['bounds'])} of {len(found['bounds'])}"
    keys = _COUNTS | ({} if report.other_view is None else {"same otherwise": "same_in_the_other_view"})
    return render(
        Path(__file__).with_name("page.html.j2"),
        title="Prompts",
        args=args,
        tiles=shown,
        bounds=[[b["broken"], f"{b['option']} {b['set']}", b["sentence"]] for b in found["bounds"]],
        counts=list(keys),
        counted=[[name, of["column"], *(number(of[key]) for key in keys.values())] for name, of in sets.items()],
        sets_above=[f"in {name}" for name in sets],
        between=_between(found),
        examples=_examples(report, args),
        quantiles=list(QUANTILES),
        lengths=[
            [name, unit, *(number(of_set[unit][label]) for label in QUANTILES)]
            for name, of_set in sets.items()
            for unit in ("words", "characters")
        ],
        charts=[_length_chart(report)] if can_draw() else [],
        guessed=guessed,
        scripts=[
            [name, _shares(of_set["scripts"]), *([_shares(of_set["languages"])] if guessed else [])]
            for name, of_set in sets.items()
        ],
        copied=_copied(report, found),
        **_kept(found, args),
        splits=[f"share of {each}" for each in args.split_shares or ()],
        strata={name: _strata(report, name, args, splits[name]) for name in (splits if args.stratify else ())},
    )


def _between(found: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name, of_set in found["sets"].items():
        cells = [name]
        for other in found["sets"]:
            counts = found["shared"][name].get(other)
            share = f"({counts['near'] / of_set['rows']:.1%})" if counts else ""
            cells.append(f"{number(counts['near'])} {share}, exact {number(counts['exact'])}" if counts else "–")
        rows.append(cells)
    return rows


def _examples(report: PromptReport, args: Any) -> list[list[Any]]:
    """
    Return a row of the table of examples for each of 8 groups of duplicates.

    Groups over several sets come before groups within a set; then groups with a held-out set before those without,
    then near duplicates before exact ones, then large groups before small ones.
    """
    chosen: dict[int, tuple[tuple, np.ndarray]] = {}
    for group, places in large_groups(report):
        names = {name for name, _ in rows_of(report, places[:1000])}
        is_exact = bool((report.duplicates.exact[places] == report.duplicates.exact[places[0]]).all())
        is_held_out = not names.isdisjoint(args.held_out)
        chosen[group] = (-min(len(names), 2), not is_held_out, is_exact, -len(places), group), places
        if len(chosen) > 64 * EXAMPLES:
            best = sorted(chosen, key=lambda each: chosen[each][0])[:EXAMPLES]
            chosen = {each: chosen[each] for each in best}
    rows = []
    for _, places in sorted(chosen.values(), key=lambda each: each[0])[:EXAMPLES]:
        similarity, pair, texts = _pair(report, places, args)
        cells = [
            {"place": f"{name} {row}", "text": _shortened(mine, theirs)}
            for (name, row), mine, theirs in zip(pair, texts, texts[::-1], strict=True)
        ]
        rows.append([number(len(places)), number(similarity, 3), *cells])
    return rows


def _pair(report: PromptReport, places: np.ndarray, args: Any) -> tuple[float, list[tuple[str, int]], list[str]]:
    """
    Return the similarity, the rows and the texts of two prompts of a group of duplicates.

    The first prompt is of a held-out set, if the group has one, or else the group's first. The second is of another
    set, if the group has several: the one most similar to the first prompt without being equal, or an equal one if
    there is no other.
    """
    where = rows_of(report, places)
    first = next((each for each in where if each[0] in args.held_out), where[0])
    others = [each for each in where if each[0] != first[0]] or [each for each in where if each != first]
    mine = report.sets[first[0]].prompt(first[1], args.by)
    best = (-1.0, first, "")
    for name, row in others[:_LOOKED_AT]:
        theirs = report.sets[name].prompt(row, args.by)
        similarity = similarity_of(mine, theirs, args.unit, args.ngram)
        if best[0] < similarity < 1 or best[0] < 0 or best[0] == 1 > similarity:
            best = (similarity, (name, row), theirs)
    return best[0], [first, best[1]], [mine, best[2]]


def _shortened(shown: str, other: str) -> str:
    """Return the part of `shown` where it begins to differ from `other`, or its beginning if they do not differ."""
    same = len(os.path.commonprefix([shown, other]))
    begin = same - _SHOWN // 4 if _SHOWN // 2 < same < max(len(shown), len(other)) else 0
    return ("…" if begin else "") + shown[begin : begin + _SHOWN] + ("…" if len(shown) > begin + _SHOWN else "")


def _length_chart(report: PromptReport) -> str:
    def draw(axes):
        least, most = max(report.words.min(), 1), max(report.words.max(), 1)
        is_wide = most > 20 * least
        spread = np.geomspace(least, most + 1, 31) if is_wide else np.linspace(least, most + 1, 31)
        edges = np.unique(spread.round()) - 0.5  # between numbers of words
        for place, (name, part) in enumerate(report.places.items()):
            words = np.maximum(report.words[part], 1)
            shape = {"histtype": "step", "linewidth": 1.6, "linestyle": LINES[place % len(LINES)]}
            axes.hist(words, edges, weights=np.full(len(words), 1 / len(words)), label=name,
                      color=COLOURS[place % len(COLOURS)], **shape)  # fmt: skip
        if is_wide:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter("")

    return chart("share of a set, by words", draw, xlabel="words")


def _shares(values: dict[str, float]) -> str:
    return ", ".join(f"{name or 'too short to say'} {share:.1%}" for name, share in list(values.items())[:12])


def _copied(report: PromptReport, found: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name, shares in report.copied.items():
        worst = int(np.argmax(shares))
        example = f"row {worst}: {shares[worst]:.0%} of its runs" if shares[worst] > 0 else "–"
        of_set = found["sets"][name]["copied"]
        rows.append([name, number(of_set["answers"]), f"{of_set['share']:.1%}", example])
    return rows


def _kept(found: dict[str, Any], args: Any) -> dict[str, list]:
    """Return the reasons to leave rows out, each set's numbers of rows left out and kept, and notes on the copies."""
    reasons = [*REASONS[1:4], *([REASONS[4]] if args.balance else [])]
    rows = []
    for name, of_set in found["sets"].items():
        parts = ", ".join(f"{split} {number(count)}" for split, count in of_set.get("splits", {}).items())
        left = (number(of_set["left_out"][why]) for why in reasons)
        rows.append([name, number(of_set["rows"]), *left, number(of_set["kept"]), parts or "–"])
    return {"reasons": reasons, "kept": rows, "notes": found["notes"]}


def _strata(report: PromptReport, name: str, args: Any, split: np.ndarray) -> list[list[str]]:
    """Return a table's rows: a frequent value of `name`, and its share in each split. The shares should be alike."""
    values = strata(report, name, args.stratify)
    counts = {
        each: Counter(v for v, of in zip(values, split, strict=True) if of == each) for each in args.split_shares
    }
    common = Counter(value for value, of in zip(values, split, strict=True) if of).most_common(12)
    rows = []
    for value, _ in common:
        shares = (f"{counts[each][value] / max(sum(counts[each].values()), 1):.1%}" for each in args.split_shares)
        label = ", ".join(
            SCRIPTS[each] if column == "script" and isinstance(each, int) else str(each)
            for column, each in zip(args.stratify, value, strict=True)
        )
        rows.append([label[:120], *shares])
    return rows
