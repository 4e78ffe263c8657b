"""Report on the prompts of named datasets, then write filtered copies.

    trl-ext prompts --sets sft=SFT rl=RL eval=EVAL:test --output_dir outputs/prompts --max_overlap eval=0

The report, a page (`prompts.html`) and JSON (`prompts.json`, `duplicates.jsonl`), shows exact and near duplicates
within and between the sets, lengths, scripts, and answers that repeat another set's answers. The copies (`SET.jsonl`,
or `SET/SPLIT.jsonl`) have no empty prompts and, unless `remove` is changed, no duplicates and no prompts of a held-out
set. Inputs are never changed. If a bound is broken, the command prints a sentence and ends with status 1; after a
wrong input it ends with status 2.
"""

import json
import re
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ...cli.parser import StrictTrlParser, pairs, path_and_split
from ...data import write_rows
from ...runs import check_output_dir, check_settings, find, overlap, setting, write_text
from ...upstream import quiet
from ..pages.markup import number, render

if TYPE_CHECKING:
    from .prompt_sets import PromptReport

QUANTILES = {"least": 0.0, "5 %": 0.05, "half": 0.5, "95 %": 0.95, "most": 1.0}
EXAMPLES = 8
_SHOWN = 400  # characters of a prompt
_BOUNDS = {
    "max_overlap": ("shared_near", "have a duplicate in another set"),
    "max_duplicates": ("near_duplicates", "have a duplicate before them in the set"),
    "max_copied": ("copied", "have an answer that repeats the corpus"),
}


def _list(help: str) -> Any:
    return field(default_factory=list, metadata={"help": help})


@dataclass
class PromptsArguments:
    """Declare the arguments of `trl-ext prompts`: the sets, what counts as a duplicate, bounds, and outputs."""

    sets: list[str] = field(
        metadata={
            "help": "Data sets as NAME=PATH or NAME=PATH:SPLIT; PATH is a .jsonl, .json, .parquet or .csv file, a "
            "folder, or a hub name."
        }
    )
    output_dir: str = field(metadata={"help": "Folder of the page, the JSON and the copies."})
    columns: list[str] = _list("Columns of prompts, as NAME=COLUMN; by default prompt, messages, chosen or text.")
    held_out: list[str] | None = setting(
        None,
        "Sets to evaluate on; rows that other sets share with these are left out. If unset, the set `eval`, if any.",
    )
    by: Literal["conversation", "last_turn"] = setting(
        "conversation", "Compare chat prompts by all turns, or by the user's last one."
    )
    threshold: float = setting(0.7, "Least Jaccard similarity of near duplicates.", range="in (0, 1]")
    unit: Literal["words", "characters"] = setting("words", "Whether n-grams are of words or of characters.")
    ngram: int = setting(3, "Number of words or characters in an n-gram.", range=">= 1")
    max_overlap: list[str] = _list(
        "NAME=SHARE: highest share of a set's rows that may have a duplicate in another set."
    )
    max_duplicates: list[str] = _list(
        "NAME=SHARE: highest share of a set's rows that may repeat an earlier row of the set."
    )
    max_copied: list[str] = _list(
        "NAME=SHARE: highest share of a set's answers that may have a run copied from `copied_from`."
    )
    copied_from: list[str] = _list("Sets whose answers the other sets' answers must not repeat.")
    copied_words: int = setting(13, "How many words in a row count as a copy.", range=">= 1")
    remove: Literal["near", "exact", "none"] = setting("near", "Which duplicates are left out of the copies.")
    split: list[str] = _list("Splits of the copies as SPLIT=SHARE, such as train=0.9 test=0.1.")
    split_sets: list[str] | None = setting(None, "Sets to `split`; if unset, all sets but the held-out ones.")
    stratify: list[str] = _list("Columns, or `length` and `script`, whose values all splits have in equal shares.")
    write: bool = setting(True, "Write copies; if False, write only the report.")
    seed: int = setting(0, "Seed of hashes and splits.")

    def __post_init__(self):
        check_settings(self)
        self.paths = pairs("sets", self.sets, "NAME=PATH")
        self.set_columns = pairs("columns", self.columns, "NAME=COLUMN")
        self.bounds = {
            name: {key: float(share) for key, share in pairs(name, getattr(self, name)).items()}
            for name in ("max_overlap", "max_duplicates", "max_copied")
        }
        self.split_shares = {name: float(share) for name, share in pairs("split", self.split).items()}
        if self.held_out is None:
            self.held_out = [name for name in ("eval",) if name in self.paths and len(self.paths) > 1]
        if self.split_sets is None:
            self.split_sets = [*self.paths]
        self.split_sets = [name for name in self.split_sets if name not in self.held_out]

    def copies(self, name: str) -> list[Path]:
        """Return the files of a set's copy: a single file, or a folder with a file for each split."""
        folder = Path(self.output_dir)
        is_split = self.split_shares and name in (self.split_sets or ())
        return (
            [folder / name / f"{split}.jsonl" for split in self.split_shares]
            if is_split
            else [folder / f"{name}.jsonl"]
        )


def check(args: PromptsArguments) -> None:
    """
    Check the output folder, and the names of sets and splits.

    Raises:
        OSError: the output folder cannot be written.
        ValueError: an argument such as `held_out` has the name of no set; a set with a bound in `max_copied` has no
            other set in `copied_from`; the name of a set or split cannot be a file's name; or data of a set lie in the
            output folder, or contain it.
    """
    check_output_dir(args.output_dir, "false")
    named = {*(args.held_out or ()), *(args.split_sets or ()), *args.copied_from, *args.set_columns}
    named = named.union(*args.bounds.values())
    places = {name: find(path_and_split(path)[0]) for name, path in args.paths.items()}
    for wrong, why in (
        (
            named - {*args.paths},
            f"is not one of `sets` ({', '.join(args.paths)}): correct it where it is named (`held_out`, `split_sets`, "
            "`copied_from`, `columns`, or a bound such as `max_overlap`)",
        ),
        (
            {*args.bounds["max_copied"]} & ({*args.copied_from} or {*args.paths}),
            "has a bound in `max_copied`: name in `copied_from` another set, whose answers it must not repeat",
        ),
        (
            [n for n in (*args.paths, *args.split_shares) if not re.fullmatch(r"\w[\w.-]*", n)],
            "cannot name a file: use letters, digits, _, - and dots",
        ),
        (
            [name for name, of in places.items() if of.exists() and overlap(Path(args.output_dir), of)],
            "is a set whose data are in `output_dir`, or contain it: choose another `output_dir`",
        ),
    ):
        if wrong:
            raise ValueError(f"{min(wrong)!r} {why}")


def main(arguments: list[str] | None = None) -> None:
    quiet()
    parser = StrictTrlParser(PromptsArguments, without_arguments=__doc__)
    (args,) = parser.parse_args_and_config(arguments)
    with parser.one_line_errors():
        check(args)
        broken = run(args)
    if broken:
        print(f"{parser.prog}: {'; '.join(broken)}", file=sys.stderr)
        sys.exit(1)


def run(args: PromptsArguments) -> list[str]:
    """Write the report and the copies; return a sentence for each bound that is broken."""
    from ...data import load_dataset_split
    from .prompt_sets import PromptSet, divide, examine_prompts, left_out

    sets = [
        PromptSet(name, load_dataset_split(*path_and_split(path), columns=()), args.set_columns.get(name, ""))
        for name, path in args.paths.items()
    ]
    report = examine_prompts(
        sets, args.by, args.threshold, args.unit, args.ngram, args.copied_from, args.copied_words, args.seed
    )
    held_out = args.held_out or []
    split_sets = args.split_sets or []
    reasons = left_out(report, args.remove, held_out)
    splits = {}
    if args.split_shares and split_sets:
        splits = divide(report, reasons, args.split_shares, split_sets, args.stratify, held_out, args.seed)
    found = figures(report, args, reasons, splits)
    grouped = groups(report)
    folder = Path(args.output_dir)
    write_rows(folder / "duplicates.jsonl", grouped)
    settings = {name: value for name, value in asdict(args).items() if name != "output_dir"}
    write_text(folder / "prompts.json", json.dumps({**found, "settings": settings}, indent=1, ensure_ascii=False))
    write_text(folder / "prompts.html", page(report, found, grouped, args))
    print("\n".join([f"Report: {folder / 'prompts.html'}", *found["notes"]]))
    files = [(name, path) for name in args.paths for path in args.copies(name)] if args.write else []
    for _, path in files:  # if this run is interrupted, no split of an earlier run may be left
        path.unlink(missing_ok=True)
    for name, path in files:
        rows = report.sets[name].rows
        places = np.flatnonzero(splits[name] == path.stem if name in splits else reasons[name] == "")
        write_rows(path, rows.select(places))
        print(f"{path}: {len(places)} of {len(rows)} rows")
    return [bound["sentence"] for bound in found["bounds"] if bound["broken"]]


# ---- Figures and page ----


def figures(report: "PromptReport", args: Any, reasons: dict[str, Any], splits: dict[str, Any]) -> dict[str, Any]:
    """
    Return the contents of `prompts.json`, except its `settings`.

    Args:
        report: what was found in the sets.
        args: the command's arguments.
        reasons: for each set's name, why each row is left out, as [`left_out`] returns it.
        splits: for each set that is divided, the name of each row's split, as [`divide`] returns it; else {}.
    """
    from .prompt_sets import REASONS

    found: dict[str, Any] = {"sets": {}, "shared": {}, "notes": [], "bounds": []}
    for name, rows in report.sets.items():
        place = report.places[name]
        others = [other for other in report.sets if other != name]
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
            "left_out": {why: int((reasons[name] == why).sum()) for why in REASONS},
            "kept": int((reasons[name] == "").sum()),
        }
        if name in report.copied:
            of_set["copied"] = int((report.copied[name] > 0).sum())
            of_set["most_copied"] = report.copied[name].max()
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
                f"the copy of {name!r} keeps rows ({leaks.sum()}) that {'held-out' if args.held_out else 'other'} "
                "sets have, too: to leave them out, name those sets in `held_out`, and set `remove: near`"
            )
    for option, bounds in args.bounds.items():
        key, what = _BOUNDS[option]
        for name, bound in bounds.items():
            if key not in found["sets"][name]:
                raise ValueError(f"`{option}` names {name!r}, a set without answers")
            count = found["sets"][name][key]
            rows = found["sets"][name]["rows"]
            sentence = f"{count} of {rows} rows of {name!r} ({count / rows:.2%}) {what}, `{option}` allows {bound:.2%}"
            judged = {"bound": bound, "share": count / rows, "broken": count / rows > bound, "sentence": sentence}
            found["bounds"].append({"option": option, "set": name, **judged})
    return found


def groups(report: "PromptReport") -> list[dict[str, Any]]:
    """
    Return a dict for each group of duplicates in a report, with these keys.

    - `kind`: "exact" or "near".
    - `rows`: the row numbers of the group, a list for each set, by the set's name.
    - `similarity`: the lowest similarity of a row to the group's first row.
    """
    near = report.duplicates.near
    exact = report.duplicates.exact
    found = []
    order = np.argsort(near, kind="stable")
    for places in np.split(order, np.flatnonzero(np.diff(near[order])) + 1):
        if len(places) > 1 and near[places[0]] >= 0:
            inside = {name: places[(places >= of.start) & (places < of.stop)] for name, of in report.places.items()}
            rows = {name: (own - report.places[name].start).tolist() for name, own in inside.items() if len(own)}
            kind = "exact" if (exact[places] == exact[places[0]]).all() else "near"
            least = round(float(report.duplicates.similarity[places].min()), 4)
            found.append({"kind": kind, "similarity": least, "rows": rows})
    return found


def page(report: "PromptReport", found: dict[str, Any], grouped: list[dict[str, Any]], args: Any) -> str:
    """
    Return the HTML page of a report on prompts, with its figures `found` and its groups of duplicates, `grouped`.
    """
    sets = found["sets"]
    rows, repeated = (sum(of[key] for of in sets.values()) for key in ("rows", "near_duplicates"))
    tiles = {"rows": number(rows), "near duplicates within sets": f"{repeated / rows:.1%}"}
    tiles |= {f"{name} shared with others": number(sets[name]["shared_near"]) for name in args.held_out}
    return render(
        Path(__file__).with_name("prompts.html.j2"),
        title="Prompts",
        args=args,
        tiles=tiles,
        found=found,
        examples=_examples(report, grouped, args),
    )


def _examples(report: "PromptReport", grouped: list[dict[str, Any]], args: Any) -> list[list[Any]]:
    """
    Return a table row for each of at most 8 groups of duplicates: their number of rows, their similarity, and two of
    their prompts. Groups in several sets come first, then large ones.
    """
    found = []
    ordered = sorted(grouped, key=lambda of: (len(of["rows"]) == 1, -sum(map(len, of["rows"].values()))))
    for group in ordered[:EXAMPLES]:
        rows = [(name, row) for name, of in group["rows"].items() for row in of]
        cells = [
            {"place": f"{name} {row}", "text": report.sets[name].prompt(row, args.by)[:_SHOWN]}
            for name, row in (rows[0], rows[-1])
        ]
        found.append([number(len(rows)), number(group["similarity"], 3), *cells])
    return found


if __name__ == "__main__":
    main()
