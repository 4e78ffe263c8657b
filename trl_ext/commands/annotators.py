"""Say how far annotators agree and who stands apart, then make preference pairs of their labels.

    trl-ext annotators --dataset_name labels.jsonl --output_dir outputs/labels

The table is long, a row a label, or wide, a row a pair with a column for each annotator (--annotator_columns). Written
are the report, `annotators.html` and `annotators.json`, and then pairs for `trl-ext reward` and `trl-ext dpo`:
`pairs/train.jsonl`, and `pairs/test.jsonl` by annotators who are not in the first. The table stays as it is.
"""

import json
import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..output_dir import check_output_dir
from ..parser import StrictTrlParser
from ..settings import check_settings
from ..shipped import find

_RANGES = {
    "confidence_bound": ("in [0.5, 1], a share of labels", lambda x: 0.5 <= x <= 1),
    "min_labels": (">= 1", lambda x: x >= 1),
    "held_out_annotators": ("in [0, 1), a share of annotators", lambda x: 0 <= x < 1),
}
_ONLY_WITH = dict.fromkeys(
    ("method", "confidence_bound", "min_labels", "held_out_annotators", "keep_columns"), ("write_pairs", True)
)


@dataclass
class AnnotatorsArguments:
    """What the table holds, whose labels count, and what they come to."""

    dataset_name: str = field(metadata={"help": "The table: a .jsonl, .csv or .parquet file, a folder, a hub name."})
    output_dir: str = field(metadata={"help": "Where the report and the pairs go."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a hub dataset."})
    dataset_split: str = field(default="train", metadata={"help": "Split, or a part of one as `train[:50%]`."})
    prompt_columns: list[str] = field(
        default_factory=lambda: ["prompt"],
        metadata={"help": "Column of the prompt; of several, texts are joined by an empty line."},
    )
    response_columns: list[str] = field(
        default_factory=lambda: ["response_a", "response_b"],
        metadata={"help": "Columns of the two answers, as they were shown."},
    )
    annotator_column: str | None = field(
        default=None, metadata={"help": "Who chose, in a long table; `annotator` if unset."}
    )
    choice_column: str | None = field(
        default=None, metadata={"help": "What was chosen, in a long table; `choice` if unset."}
    )
    score_columns: list[str] | None = field(
        default=None, metadata={"help": "In the place of choices: a score for each of the two answers."}
    )
    annotator_columns: list[str] | None = field(
        default=None, metadata={"help": "Of a wide table: columns with the choices of one annotator each."}
    )
    choice_values: list[str] = field(
        default_factory=lambda: ["a", "b", "tie"],
        metadata={"help": "What stands for the first answer, for the second, and, all others, for a tie."},
    )
    item_column: str | None = field(
        default=None, metadata={"help": "What names a pair; if unset, equal texts, in any order, are one pair."}
    )
    time_column: str | None = field(default=None, metadata={"help": "When a label was given: numbers or dates."})
    seconds_column: str | None = field(default=None, metadata={"help": "How long a label took."})
    confidence_column: str | None = field(default=None, metadata={"help": "How sure the annotator was: a number."})
    keep_columns: list[str] | None = field(
        default=None, metadata={"help": "Further columns to keep in the pairs, such as a topic."}
    )
    write_pairs: bool = field(default=True, metadata={"help": "Whether to write pairs after the report."})
    method: Literal["majority", "dawid_skene", "mace"] = field(
        default="majority",
        metadata={"help": "What the labels of a pair come to: by votes, or by who is how good (Dawid-Skene, MACE)."},
    )
    confidence_bound: float = field(
        default=0.6, metadata={"help": "Least share of an item's labels, or probability, that its winner must have."}
    )
    min_labels: int = field(default=1, metadata={"help": "Least number of labels of a pair."})
    min_zscore: float | None = field(
        default=-3.0, metadata={"help": "Annotators whose agreement has a lower z-score are left out; null keeps all."}
    )
    held_out_annotators: float = field(
        default=0.2, metadata={"help": "Share of annotators whose pairs are for the test alone; 0 for no test."}
    )
    seed: int = field(default=0, metadata={"help": "Of the bootstrap and of who is held out."})

    def __post_init__(self) -> None:
        check_settings(self, _RANGES, _ONLY_WITH)
        if len(self.response_columns) != 2:
            raise ValueError(f"`response_columns` must be two, got {self.response_columns}")


def report_labels(args: AnnotatorsArguments) -> dict[str, Any]:
    """
    Write the report and the pairs, and return what is in the report.

    Raises:
        ValueError: the table cannot be read, or no pair is left; the report is written then, too.
    """
    from ..data import load_dataset_split
    from ..data.annotators import Columns, agreement_report, hold_out_annotators, read_labels

    folder = Path(args.output_dir)
    if folder.resolve() in (given := find(args.dataset_name).resolve(), *given.parents):
        raise ValueError(f"`output_dir` {folder} holds the table {args.dataset_name}: choose another one")
    columns = Columns(
        prompt=tuple(args.prompt_columns),
        responses=(args.response_columns[0], args.response_columns[1]),
        annotator=args.annotator_column,
        choice=args.choice_column,
        annotators=tuple(args.annotator_columns or ()),
        scores=tuple(args.score_columns or ()),
        values=tuple(args.choice_values),
        item=args.item_column,
        time=args.time_column,
        seconds=args.seconds_column,
        confidence=args.confidence_column,
    )
    needed = (*columns.names, *(args.keep_columns or ()))
    dataset = load_dataset_split(args.dataset_name, args.dataset_split, config=args.dataset_config, columns=needed)
    labels = read_labels(dataset, columns)
    report: dict[str, Any] = {"settings": asdict(args), **agreement_report(labels, args.seed)}
    off = {row["annotator"] for row in report["annotators"] if _is_off(row["z"], args.min_zscore)}
    if off:
        kept = labels.where(~np.isin(np.array(labels.annotators, object)[labels.annotator], list(off)))
        report["without_left_out"] = {
            name: value
            for name, value in agreement_report(kept, args.seed).items()
            if name in ("labels", "alpha", "alpha_interval", "agreement")
        }
        labels = kept
    report["left_out_annotators"] = sorted(off)
    write_report(folder, report)
    if not args.write_pairs:
        return report
    train, test = hold_out_annotators(labels, args.held_out_annotators, args.seed)
    if args.held_out_annotators and test is None:
        report["unknown"].append("One annotator is left, so nobody could be held out for a test.")
    report["pairs"] = {"train": _write_pairs(folder, "train", dataset, train, columns, args, args.method)}
    # Who is tested is no model's guess: votes alone
    if test is not None:
        report["pairs"]["test"] = _write_pairs(folder, "test", dataset, test, columns, args, "majority")
    else:
        (folder / "pairs" / "test.jsonl").unlink(missing_ok=True)  # of an earlier run: it may hold these people
    write_report(folder, report)
    if not report["pairs"]["train"]["pairs"]:
        raise ValueError(f"no pair is left to train on: {folder / 'annotators.html'} says why")
    return report


def write_report(folder: Path, report: dict[str, Any]) -> None:
    """Write `annotators.json` and the page of it, `annotators.html`."""
    from .annotators_page import page

    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "annotators.json", [json.dumps(report, indent=2, ensure_ascii=False) + "\n"])
    _write(folder / "annotators.html", [page(report)])


def _is_off(z: float | None, bound: float | None) -> bool:
    return z is not None and bound is not None and z < bound


def _write_pairs(
    folder: Path, split: str, dataset: Any, labels: Any, columns: Any, args: AnnotatorsArguments, method: Any
) -> dict[str, Any]:
    """Write the pairs of a split, none if there are none, and say how many there are and what was left out."""
    from ..data.annotators import majority_pairs, shares_of_labels

    path = folder / "pairs" / f"{split}.jsonl"
    left_out: dict[str, int] = {}
    confidences: list[float] = []
    examples: list[dict[str, Any]] = []

    def lines() -> Iterable[str]:
        pairs = majority_pairs(
            dataset,
            labels,
            columns,
            shares=shares_of_labels(labels, method),
            confidence_bound=args.confidence_bound,
            min_labels=args.min_labels,
            keep_columns=args.keep_columns or (),
            left_out=left_out,
        )
        for pair in pairs:
            confidences.append(pair["confidence"])
            if len(examples) < 3:
                examples.append(pair)
            yield json.dumps(pair, ensure_ascii=False, default=str) + "\n"

    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, lines())
    if not confidences:
        path.unlink()  # a file without a row cannot be loaded
    who = sorted(labels.annotators[place] for place in np.unique(labels.annotator))
    counted = np.histogram(confidences, np.linspace(0.5, 1, 11))[0].tolist()
    return {
        "file": str(path) if confidences else None,
        "pairs": len(confidences),
        "confidence": float(np.mean(confidences)) if confidences else None,
        "confidence_histogram": counted,  # of [0.5, 0.55), … [0.95, 1]
        "annotators": who,
        "items": int((labels.counts().sum(1) > 0).sum()),
        "left_out": {reason: number for reason, number in left_out.items() if number},
        "examples": examples,
    }


def _write(path: Path, lines: Iterable[str]) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(lines)
    temporary.replace(path)


def main(arguments: list[str] | None = None) -> None:
    parser = StrictTrlParser(AnnotatorsArguments, without_arguments=__doc__)
    (args,) = parser.parse_args_and_config(arguments)
    with parser.one_line_errors():
        check_output_dir(args.output_dir, None)
        report = report_labels(args)
    alpha, pairs = report["alpha"], report.get("pairs", {})
    said = "not known" if alpha is None else "{:.3f} ({:.3f} to {:.3f})".format(alpha, *report["alpha_interval"])
    print(f"Labels: {report['labels']:,} of {len(report['annotators'])} annotators; Krippendorff's α {said}")
    for sentence in report["unknown"]:
        print(f"Note: {sentence}")
    if report["left_out_annotators"]:
        print(f"Left out: {', '.join(report['left_out_annotators'][:10])}, by their z-scores")
    for found in pairs.values():
        if found["file"]:
            print(f"Pairs: {found['file']}, {found['pairs']:,} by {len(found['annotators'])} annotators")
    folder = Path(args.output_dir)
    print(f"Report: {folder / 'annotators.html'}" + (f"; next: {_next(folder)}" if pairs else ""))


def _next(folder: Path) -> str:
    given = {"dataset_name": folder / "pairs", "model_name_or_path": "PATH_OR_HUB_NAME", "use_confidence": "true"}
    return shlex.join(["trl-ext", "reward", *(str(word) for name in given for word in (f"--{name}", given[name]))])


if __name__ == "__main__":
    main()
