"""The page of `trl-ext prompts`."""

import importlib.util
import os
from collections import Counter
from typing import Any

import numpy as np

from ...data import SCRIPTS, similarity_of
from ..pages.charts import COLOURS, LINES, chart
from ..pages.markup import Markup, code, document, html, number, prose
from .examine import PromptReport
from .figures import QUANTILES, large_groups, rows_of
from .filtering import REASONS, strata

EXAMPLES = 8
_LOOKED_AT = 50  # rows of a group, for an example
_SHOWN = 400  # characters of a prompt


def page(report: PromptReport, found: dict[str, Any], args: Any, splits: dict[str, Any]) -> str:
    """The HTML."""
    rows = sum(of_set["rows"] for of_set in found["sets"].values())
    repeated = sum(of_set["near_duplicates"] for of_set in found["sets"].values())
    shared = {name: found["sets"][name]["shared_near"] for name in args.held_out}
    shown = {"rows": number(rows), "near duplicates within sets": f"{repeated / rows:.1%}"}
    shown |= {f"{name} shared with others": number(count) for name, count in shared.items()}
    if found["bounds"]:
        shown["bounds broken"] = f"{sum(bound['broken'] for bound in found['bounds'])} of {len(found['bounds'])}"
    how = (
        f"Near duplicates share {args.threshold:g} or more of their {args.ngram}-grams of {args.unit} (Jaccard). Chat "
        f"prompts are compared by {'all turns' if args.by == 'conversation' else 'the last turn of the user'}. Case, "
        "white space and forms of letters do not count."
    )
    parts = [
        html.note(how),
        html.tiles(shown),
        html.section("Bounds", _bounds(found)) if found["bounds"] else "",
        html.section("Sets", _sets(report, found)),
        html.section("Between sets", _between(found)) if len(report.sets) > 1 else "",
        html.section("Examples", _examples(report, args)),
        html.section("Lengths", _lengths(report, found)),
        html.section("Scripts and languages", _scripts(report, found)),
        html.section("Copied answers", _copied(report, found, args)) if args.copied_from else "",
        html.section("What is kept", _kept(report, found, args, splits)),
    ]
    return document("Prompts", parts)


def _bounds(found: dict[str, Any]) -> str:
    state = {True: html.marked("broken"), False: "holds"}
    rows = [[state[b["broken"]], f"{b['option']} {b['set']}", b["sentence"]] for b in found["bounds"]]
    return html.table([("state", "short"), ("bound", "short"), ("found", "")], rows)


def _sets(report: PromptReport, found: dict[str, Any]) -> str:
    keys = {
        "rows": "rows",
        "empty": "empty",
        "exact": "exact_duplicates",
        "near": "near_duplicates",
        "largest group": "largest_group",
        "joined by others": "joined_by_others",
    }
    if report.other_view is not None:
        keys["same otherwise"] = "same_in_the_other_view"
    rows = [
        [name, of_set["column"], *(number(of_set[key]) for key in keys.values())]
        for name, of_set in found["sets"].items()
    ]
    said = (
        "*exact* and *near* count rows with a duplicate before them in the set, near ones with exact "
        "ones; *joined by others*, rows further from the first of their group than the threshold."
    )
    if report.other_view is not None:
        said += (
            " *same otherwise* counts rows that have more equals where chat is compared the other way, by the "
            "user's last turn or by all turns."
        )
    return html.note(prose(said)) + html.table(
        [("set", "short"), ("column", "short"), *((key, "number") for key in keys)], rows
    )


def _between(found: dict[str, Any]) -> str:
    names = list(found["sets"])
    rows = []
    for name in names:
        total = found["sets"][name]["rows"]
        cells = [name]
        for other in names:
            counts = found["shared"][name].get(other)
            cells.append(
                f"{number(counts['near'])} ({counts['near'] / total:.1%}), exact {number(counts['exact'])}"
                if counts
                else "–"
            )
        rows.append(cells)
    said = html.note("Rows of the set on the left that are near duplicates of a row of the set above.")
    return said + html.table([("rows of", "short"), *((f"in {name}", "") for name in names)], rows)


def _examples(report: PromptReport, args: Any) -> str:
    """Groups of several sets first, of these those with a held-out one; then near before exact, and large ones."""
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
            html.above(f"{name} {row}", _shortened(mine, theirs))
            for (name, row), mine, theirs in zip(pair, texts, texts[::-1], strict=True)
        ]
        rows.append([number(len(places)), number(similarity, 3), *cells])
    if not rows:
        return html.note("No duplicates.")
    head = [("rows of the group", "number"), ("similarity", "number"), ("a row", "text"), ("another", "text")]
    return html.note(code("All groups with their rows are in `duplicates.jsonl`; rows count from 0.")) + html.table(
        head, rows
    )


def _pair(report: PromptReport, places: np.ndarray, args: Any) -> tuple[float, list[tuple[str, int]], list[str]]:
    """
    The similarity, the rows and the texts of two of a group: the most similar ones that are not the same, if there are
    any; of a held-out set and another one, or of two sets, if the group has such.
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
    """The part of a prompt where another one begins to differ; its beginning if they do not."""
    same = len(os.path.commonprefix([shown, other]))
    begin = same - _SHOWN // 4 if _SHOWN // 2 < same < max(len(shown), len(other)) else 0
    return ("…" if begin else "") + shown[begin : begin + _SHOWN] + ("…" if len(shown) > begin + _SHOWN else "")


def _lengths(report: PromptReport, found: dict[str, Any]) -> str:
    rows = [
        [name, unit, *(number(of_set[unit][label]) for label in QUANTILES)]
        for name, of_set in found["sets"].items()
        for unit in ("words", "characters")
    ]
    shown = html.table([("set", "short"), ("unit", "short"), *((label, "number") for label in QUANTILES)], rows)
    if importlib.util.find_spec("matplotlib") is None:
        return shown

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

    return shown + html.charts([chart("share of a set, by words", draw, xlabel="words")])


def _scripts(report: PromptReport, found: dict[str, Any]) -> str:
    def shares(values: dict[str, float]) -> str:
        return ", ".join(f"{name or 'too short to say'} {share:.1%}" for name, share in list(values.items())[:12])

    guessed = report.languages is not None
    rows = [
        [name, shares(of_set["scripts"]), *([shares(of_set["languages"])] if guessed else [])]
        for name, of_set in found["sets"].items()
    ]
    said = (
        "Languages are what py3langid guesses of 2,000 rows of a set at most, with five words or more."
        if guessed
        else "Scripts alone, by Unicode: languages need `pip install 'trl-ext[labels]'`, for py3langid."
    )
    head = [("set", "short"), ("script of most letters", ""), *([("language", "")] if guessed else [])]
    return html.note(code(said)) + html.table(head, rows)


def _copied(report: PromptReport, found: dict[str, Any], args: Any) -> str:
    rows = []
    for name, shares in report.copied.items():
        worst = int(np.argmax(shares))
        example = f"row {worst}: {shares[worst]:.0%} of its runs" if shares[worst] > 0 else "–"
        of_set = found["sets"][name]["copied"]
        rows.append([name, number(of_set["answers"]), f"{of_set['share']:.1%}", example])
    if not rows:
        return html.note("No other set has answers.")
    said = f"Answers with {args.copied_words} or more words in a row from an answer of {', '.join(args.copied_from)}."
    return html.note(said) + html.table(
        [("set", "short"), ("answers", "number"), ("share", "number"), ("most copied", "")], rows
    )


def _kept(report: PromptReport, found: dict[str, Any], args: Any, splits: dict[str, Any]) -> str:
    names = [*REASONS[1:4], *([REASONS[4]] if args.balance else [])]
    rows = []
    for name, of_set in found["sets"].items():
        parts = ", ".join(f"{split} {number(count)}" for split, count in of_set.get("splits", {}).items())
        left = (number(of_set["left_out"][why]) for why in names)
        rows.append([name, number(of_set["rows"]), *left, number(of_set["kept"]), parts or "–"])
    head = [
        ("set", "short"),
        ("rows", "number"),
        *((why, "number") for why in names),
        ("kept", "number"),
        ("splits", ""),
    ]
    said = (
        "Of duplicates the first row stays, and rows with different answers are none. What shares a held-out set's "
        "prompt goes, and no group of near duplicates is in two splits, of one set or of two."
    )
    shown = html.note(said) + Markup().join(html.note(note) for note in found["notes"]) + html.table(head, rows)
    for name in splits if args.stratify else ():
        shown += html.subsection(f"{name} by {', '.join(args.stratify)}", _strata(report, name, args, splits[name]))
    return shown


def _strata(report: PromptReport, name: str, args: Any, split: np.ndarray) -> str:
    """How the splits compare in what they shall have alike."""
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
    return html.table([("value", ""), *((f"share of {each}", "number") for each in args.split_shares)], rows)
