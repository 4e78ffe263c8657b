"""Report on the prompts of named data sets, then write filtered copies.

    trl-ext prompts --sets sft=SFT rl=RL eval=EVAL:test --output_dir outputs/prompts --max_overlap eval=0

Exact and near duplicates within and between the sets, lengths, scripts and languages, answers that repeat another
set's, on a page (`prompts.html`) and in JSON (`prompts.json`, `duplicates.jsonl`). The copies (`SET.jsonl`, or
`SET/SPLIT.jsonl`) have neither duplicates nor what a held-out set has. Inputs are never changed. A broken bound ends
the command with status 1 and one sentence, a wrong input with status 2.
"""

import json
import math
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ...cli.parser import StrictTrlParser, pairs, path_and_split
from ...data import write_rows
from ...runs import check_output_dir, check_settings, find, overlap, setting, write_text
from ...upstream import late_bars, quiet

# Memory, measured with a million rows of any length, with splits by a column
BYTES_A_ROW = 1000
OWN = ("prompts.html", "prompts.json", "duplicates.jsonl")  # the files of the report


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
    columns: list[str] = field(
        default_factory=list,
        metadata={"help": "Columns of prompts, as NAME=COLUMN; by default prompt, messages, chosen or text."},
    )
    held_out: list[str] | None = setting(
        None, "Sets to evaluate on: others lose what they share with these. If unset, `eval`, if given."
    )
    by: Literal["conversation", "last_turn"] = setting(
        "conversation", "Compare chat prompts by all turns, or by the user's last one."
    )
    threshold: float = setting(0.7, "Least Jaccard similarity of near duplicates.", range="in (0, 1]")
    unit: Literal["words", "characters"] = setting("words", "Whether n-grams are of words or of characters.")
    ngram: int = setting(3, "Words or characters in an n-gram.", range=">= 1")
    num_perm: int = setting(128, "Hashes of a MinHash signature.", range=">= 16")
    max_overlap: list[str] = field(
        default_factory=list,
        metadata={"help": "NAME=SHARE: highest share of a set's rows that may have a duplicate in another set."},
    )
    max_duplicates: list[str] = field(
        default_factory=list,
        metadata={"help": "NAME=SHARE: highest share of a set's rows that may repeat a row before them in the set."},
    )
    copied_from: list[str] = field(
        default_factory=list, metadata={"help": "Sets whose answers other sets' answers must not repeat."}
    )
    copied_words: int = setting(13, "Words in a row that make a copy.", range=">= 1")
    max_copied: list[str] = field(
        default_factory=list,
        metadata={"help": "NAME=SHARE: highest share of a set's answers that may have a copied run."},
    )
    remove: Literal["near", "exact", "none"] = setting("near", "Which duplicates are left out of the copies.")
    split: list[str] = field(
        default_factory=list, metadata={"help": "SPLIT=SHARE of the copies, such as train=0.9 test=0.1."}
    )
    stratify: list[str] = field(
        default_factory=list,
        metadata={"help": "Columns, or `length` and `script`, whose values all splits have in equal shares."},
    )
    balance: list[str] = field(
        default_factory=list,
        metadata={"help": "Columns, or `length` and `script`: each of their values keeps equally many rows."},
    )
    balance_to: int | None = setting(None, "Most rows of a value; if unset as many as the rarest has.", range=">= 1")
    split_sets: list[str] | None = setting(None, "Sets to `split` and `balance`; if unset all but the held-out ones.")
    write: bool = setting(True, "Write copies; else the report alone.")
    seed: int = setting(0, "Seed of hashes, balance and splits.")

    def __post_init__(self):
        check_settings(self)
        self.paths = pairs("sets", self.sets, "NAME=PATH")
        for name in self.paths:
            _check_file_name("sets", name)
        self.set_columns = self._of_sets("columns", "NAME=COLUMN")
        self.bounds = {name: self._shares(name) for name in ("max_overlap", "max_duplicates", "max_copied")}
        if self.held_out is None:
            self.held_out = [name for name in ("eval",) if name in self.paths and len(self.paths) > 1]
        if self.split_sets is None:
            self.split_sets = [name for name in self.paths if name not in self.held_out]
        for name in ("held_out", "split_sets", "copied_from"):
            self._check_names(name, getattr(self, name))
        if (self.split or self.balance) and not self.split_sets:
            raise ValueError(
                "`split` and `balance` do not change held-out sets, and all sets are held out: leave one out of "
                "`held_out`"
            )
        if {*self.held_out} & {*self.split_sets} and (self.split or self.balance):
            raise ValueError(
                f"`split_sets` and `held_out` both name {min({*self.held_out} & {*self.split_sets})!r}, but a "
                "held-out set is not split: name it in one of them"
            )
        self.split_shares = {name: share("split", name, value) for name, value in pairs("split", self.split).items()}
        for name in self.split_shares:
            _check_file_name("split", name)
        if self.split_shares and (
            min(self.split_shares.values()) <= 0 or abs(sum(self.split_shares.values()) - 1) > 1e-6
        ):
            raise ValueError(f"`split`: shares must be above 0 and have the sum 1, got {' '.join(self.split)}")
        if self.write:
            self._check_copies()
        for needed, name in (("split", "stratify"), ("balance", "balance_to"), ("copied_from", "max_copied")):
            if getattr(self, name) and not getattr(self, needed):
                raise ValueError(
                    f"`{name}` has an effect only with `{needed}`: give `{needed}`, too, or leave `{name}` out"
                )

    def _check_copies(self) -> None:
        """Refuse a set's name if the set's copy would overwrite the report or another set's copy."""
        taken = {Path(self.output_dir, name): f"the report's {name}" for name in OWN}
        for name in self.paths:
            for path in copies(self, name):
                for other, what in taken.items():
                    one, two = (Path(str(each).casefold()) for each in (path, other))  # as macOS and Windows compare
                    if one == two or one in two.parents or two in one.parents:
                        raise ValueError(
                            f"`sets`: the copy of {name!r} would be {path}, and overwrite {what}: rename the set"
                        )
            taken |= dict.fromkeys(copies(self, name), f"the copy of {name!r}")

    def _of_sets(self, name: str, form: str) -> dict[str, str]:
        found = pairs(name, getattr(self, name), form)
        self._check_names(name, found)
        return found

    def _shares(self, name: str) -> dict[str, float]:
        return {key: share(name, key, value) for key, value in self._of_sets(name, "NAME=SHARE").items()}

    def _check_names(self, name: str, given: Iterable[str]) -> None:
        for each in given:
            if each not in self.paths:
                raise ValueError(f"`{name}` names {each!r}, which is not one of the sets {', '.join(self.paths)}")


def _check_file_name(option: str, name: str) -> None:
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(
            f"`{option}`: {name!r} must be fit for a file's name: take only letters, digits, '_', '.', '-'"
        )


def share(option: str, name: str, value: str) -> float:
    """Convert the share that `option` gives `name` to a number; refuse one that is not from 0 to 1."""
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number <= 1:
        raise ValueError(f"`{option}`: the share of {name!r} must be from 0 to 1, got {value!r}")
    return number


def load(args: PromptsArguments) -> list[Any]:
    """Load the sets that `args.sets` names, each as a `PromptSet`."""
    from ...data import load_dataset_split
    from .examine import PromptSet

    found = []
    for name, given in args.paths.items():
        path, split = path_and_split(given)
        try:
            rows = load_dataset_split(path, split, columns=())
        except (UnicodeDecodeError, ValueError) as error:
            raise ValueError(f"set {name!r}: {error}") from error
        found.append(PromptSet(name, rows, args.set_columns.get(name, "")))
    return found


def check_memory(rows: int) -> None:
    """Refuse, before hours of work, a number of rows that would not fit into the free memory."""
    import psutil

    needed, free = rows * BYTES_A_ROW, psutil.virtual_memory().available
    if needed > free:
        raise ValueError(
            f"{rows:,} rows need some {needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} GiB are free: give a "
            "part of a set, as NAME=PATH:train[:50%]"
        )


def check_output(args: PromptsArguments) -> None:
    """
    Refuse an output folder that cannot be written, or that overlaps an input.

    Refuse also a folder with an earlier run's copies of other splits, which would be read together with the new ones.
    """
    check_output_dir(args.output_dir, "false")
    folder = Path(args.output_dir)
    for name, path in args.paths.items():
        place = find(path_and_split(path)[0])
        if place.exists() and (why := overlap(folder, place)):
            raise ValueError(f"`output_dir` {folder} {why} set {name!r}: choose another folder")
    if not args.write:
        return
    for name in args.paths:
        mine = {*copies(args, name)}
        found = {*(folder / name).glob("*.jsonl"), *folder.glob(f"{name}.jsonl")}
        for stale in sorted(found - mine):
            raise ValueError(f"{stale} is of an earlier run with other splits: delete it, or choose another folder")


def is_split(args: PromptsArguments, name: str) -> bool:
    """Return whether the copy of the set `name` is divided into splits, which makes it a folder, not a file."""
    return bool(args.split_shares) and name in (args.split_sets or ())


def copies(args: PromptsArguments, name: str) -> list[Path]:
    """Return the files that the copy of the set `name` is written to."""
    folder = Path(args.output_dir)
    return (
        [folder / name / f"{split}.jsonl" for split in args.split_shares]
        if is_split(args, name)
        else [folder / f"{name}.jsonl"]
    )


def main(arguments: list[str] | None = None) -> None:
    quiet()
    parser = StrictTrlParser(PromptsArguments, without_arguments=__doc__)
    (args,) = parser.parse_args_and_config(arguments)
    late_bars()
    with parser.one_line_errors():
        check_output(args)
        sets = load(args)
        check_memory(sum(map(len, sets)))
        broken = run(args, sets)
    if broken:
        print(f"{parser.prog}: {'; '.join(broken)}", file=sys.stderr)
        sys.exit(1)


def run(args: PromptsArguments, sets: list[Any]) -> list[str]:
    """Write the report and the copies; return a sentence for each bound that is broken."""
    import numpy as np

    from .examine import examine_prompts
    from .figures import broken_bounds, figures, groups
    from .filtering import REASONS, balance, divide, left_out
    from .page import page

    report = examine_prompts(
        sets,
        *(args.by, args.threshold, args.unit, args.ngram, args.num_perm),
        *(args.copied_from, args.copied_words, args.seed),
    )
    held_out, split_sets = args.held_out or [], args.split_sets or []
    reasons = left_out(report, args.remove, held_out)
    if args.balance:
        reasons = balance(report, reasons, split_sets, args.balance, args.balance_to, args.seed)
    splits: dict[str, Any] = {}
    if args.split_shares and split_sets:
        splits = divide(report, reasons, args.split_shares, split_sets, args.stratify, held_out, args.seed)
    found = figures(report, args, reasons, splits)
    found["bounds"] = broken_bounds(args.bounds, found)
    folder = Path(args.output_dir)
    write_rows(folder / "duplicates.jsonl", groups(report))
    settings = {name: value for name, value in asdict(args).items() if name != "output_dir"}
    write_text(folder / "prompts.json", json.dumps({**found, "settings": settings}, indent=1, ensure_ascii=False))
    write_text(folder / "prompts.html", page(report, found, args, splits))
    print(f"Report: {folder / 'prompts.html'}")
    for note in found["notes"]:
        print(note)
    for name in report.sets if args.write else ():
        for path in copies(args, name):  # if this run is interrupted, no split of an earlier run may be left
            path.unlink(missing_ok=True)
    for name, rows in report.sets.items() if args.write else ():
        for path in copies(args, name):
            places = splits[name] == path.stem if name in splits else reasons[name] == REASONS.index("")
            write_rows(path, rows.rows_at(np.flatnonzero(places)))
            print(f"{path}: {int(places.sum())} of {len(rows)} rows")
    return [bound["sentence"] for bound in found["bounds"] if bound["broken"]]


if __name__ == "__main__":
    main()
