"""Report how far annotators agree and who stands apart, then make preference pairs from their labels.

    trl-ext annotators --dataset_name labels.jsonl --output_dir outputs/labels

The table is long, a row a label, or wide, a row a pair with a column for each annotator (--annotator_columns), or it
ranks answers, several in a row or one in each (--score_columns). The report is `annotators.html` and
`annotators.json`. Then pairs for `trl-ext reward` and `trl-ext dpo` are written: `pairs/train.jsonl`, and
`pairs/test.jsonl` by other annotators. The table is not changed.
"""

import json
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ...cli.parser import StrictTrlParser
from ...data import write_rows
from ...runs import check_output_dir, check_settings, find, overlap, setting, write_text
from ...upstream import late_bars, quiet

_OWN = {"prompt", "chosen", "rejected", "confidence", "weight", "votes", "annotators", "row"}


@dataclass
class AnnotatorsArguments:
    """Declare the arguments of `trl-ext annotators`: the table's columns, and which labels count and how."""

    dataset_name: str = field(metadata={"help": "The table: a .jsonl, .csv or .parquet file, a folder, a hub name."})
    output_dir: str = field(metadata={"help": "Where the report and the pairs go."})
    dataset_config: str | None = setting(None, "Configuration of a hub dataset.")
    dataset_split: str = setting("train", "Split, or a part of one as `train[:50%]`.")
    prompt_columns: list[str] = field(
        default_factory=lambda: ["prompt"],
        metadata={"help": "Column of the prompt; of several, texts are joined by an empty line."},
    )
    response_columns: list[str] = field(
        default_factory=lambda: ["response_a", "response_b"],
        metadata={
            "help": "Columns of the two answers in the order shown, of more answers that are ranked, or of one if a "
            "row has one answer."
        },
    )
    annotator_column: str | None = setting(None, "Who chose, in a long table; `annotator` if unset.")
    choice_column: str | None = setting(None, "What was chosen, in a long table; `choice` if unset.")
    score_columns: list[str] | None = setting(
        None, "Instead of choices, a column with a score for each of the answers."
    )
    lowest_wins: bool = setting(False, "Scores are ranks: 1 is the best.")
    annotator_columns: list[str] | None = setting(
        None, "In a wide table, a column for each annotator, with choices, or with scores of one answer a row."
    )
    choice_values: list[str] = field(
        default_factory=lambda: ["a", "b", "tie"],
        metadata={"help": "Values for the first answer, for the second, and, all others, for a tie."},
    )
    item_column: str | None = setting(
        None, "Name of a pair, or of a ranking's prompt; if unset, equal texts are one pair."
    )
    time_column: str | None = setting(None, "When a label was given: numbers or dates.")
    seconds_column: str | None = setting(None, "Seconds that a label took.")
    confidence_column: str | None = setting(None, "How sure the annotator was: a number.")
    keep_columns: list[str] | None = setting(
        None, "Further columns to keep in the pairs, such as a topic.", only_with=("write_pairs", True)
    )
    write_pairs: bool = setting(True, "Whether to write pairs after the report.")
    method: Literal["majority", "dawid_skene", "mace", "noisy_bt"] = setting(
        "majority",
        "How a pair's labels are aggregated: by votes, by how good each annotator is (Dawid-Skene, MACE), or also by "
        "the answers' scores (noisy Bradley-Terry, for rankings).",
        only_with=("write_pairs", True),
    )
    confidence_bound: float = setting(
        0.6,
        "Least share of an item's labels, or probability, that its winner must have.",
        range="in [0.5, 1], a share of labels",
        only_with=("write_pairs", True),
    )
    min_labels: int = setting(1, "Least number of labels of a pair.", range=">= 1", only_with=("write_pairs", True))
    min_zscore: float | None = setting(
        -3.0, "Annotators whose agreement has a lower z-score are left out; null keeps all."
    )
    held_out_annotators: float = setting(
        0.2,
        "Share of annotators whose pairs are for the test alone; 0 for no test.",
        range="in [0, 1), a share of annotators",
        only_with=("write_pairs", True),
    )
    seed: int = setting(0, "Seed of the bootstrap and of the held-out annotators.")

    def __post_init__(self) -> None:
        check_settings(self)
        if own := {*(self.keep_columns or ())} & _OWN:
            raise ValueError(
                f"`keep_columns` names {min(own)!r}, but pairs have a column of that name already: rename the table's"
            )


def report_labels(args: AnnotatorsArguments) -> dict[str, Any]:
    """
    Write the report and the pairs, and return what `annotators.json` holds.

    Raises:
        ValueError: the table cannot be read; or no pair is left to train on, which the report, already written,
            explains.
    """
    from ...data import load_dataset_split
    from . import Columns, agreement_report, hold_out_annotators, read_labels

    folder = Path(args.output_dir)
    if (why := overlap(folder, find(args.dataset_name))) and find(args.dataset_name).exists():
        raise ValueError(f"`output_dir` {folder} {why} the table {args.dataset_name}: choose another one")
    columns = Columns(
        prompt=tuple(args.prompt_columns),
        responses=tuple(args.response_columns),
        annotator=args.annotator_column,
        choice=args.choice_column,
        annotators=tuple(args.annotator_columns or ()),
        scores=tuple(args.score_columns or ()),
        lowest_wins=args.lowest_wins,
        values=tuple(args.choice_values),
        item=args.item_column,
        time=args.time_column,
        seconds=args.seconds_column,
        confidence=args.confidence_column,
    )
    dataset = load_dataset_split(args.dataset_name, args.dataset_split, config=args.dataset_config, columns=())
    labels = read_labels(dataset, columns)
    if missing := [name for name in args.keep_columns or () if name not in dataset.column_names]:
        raise ValueError(f"`keep_columns`: the table has no column {', '.join(map(repr, missing))}")
    report: dict[str, Any] = {"settings": asdict(args), **agreement_report(labels, args.seed)}
    least = -np.inf if args.min_zscore is None else args.min_zscore
    off = {row["annotator"] for row in report["annotators"] if row["z"] is not None and row["z"] < least}
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
    # Delete an earlier run's test pairs first: if this run is interrupted, they must not stand beside training pairs
    # by the same annotators
    (folder / "pairs" / "test.jsonl").unlink(missing_ok=True)
    train, test = hold_out_annotators(labels, args.held_out_annotators, args.seed)
    if args.held_out_annotators and test is None and len(labels):
        report["unknown"].append("Only one annotator is left, so none could be held out for a test.")
    report["pairs"] = {"train": _write_pairs(folder, "train", dataset, train, columns, args, args.method)}
    # Test pairs are made by votes alone, so that they do not rest on a model's guess
    if test is not None:
        report["pairs"]["test"] = _write_pairs(folder, "test", dataset, test, columns, args, "majority")
    write_report(folder, report)
    if not report["pairs"]["train"]["pairs"]:
        raise ValueError(f"no pair is left to train on: {folder / 'annotators.html'} says why")
    return report


def write_report(folder: Path, report: dict[str, Any]) -> None:
    """Write the report as `annotators.json`, and as the page `annotators.html`."""
    from .page import page

    write_text(folder / "annotators.json", json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    write_text(folder / "annotators.html", page(report))


def _write_pairs(
    folder: Path, split: str, dataset: Any, labels: Any, columns: Any, args: AnnotatorsArguments, method: Any
) -> dict[str, Any]:
    """Write the pairs of one split; return the report's part on them: how many, by whom, and what was left out."""
    from . import majority_pairs, shares_of_labels

    path = folder / "pairs" / f"{split}.jsonl"
    left_out: dict[str, int] = {}
    confidences: list[float] = []
    examples: list[dict[str, Any]] = []

    def rows() -> Iterator[dict[str, Any]]:
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
                examples.append({name: pair[name] for name in ("prompt", "chosen", "rejected", "confidence")})
            yield pair

    write_rows(path, rows())
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


def main(arguments: list[str] | None = None) -> None:
    quiet()
    parser = StrictTrlParser(AnnotatorsArguments, without_arguments=__doc__)
    (args,) = parser.parse_args_and_config(arguments)
    late_bars()
    with parser.one_line_errors():
        check_output_dir(args.output_dir, None)
        report = report_labels(args)
    from ..pages.markup import with_interval

    pairs, said = report.get("pairs", {}), with_interval(report["alpha"], report["alpha_interval"], ".3f", "not known")
    print(f"Labels: {report['labels']:,} of {len(report['annotators'])} annotators; Krippendorff's α {said}")
    for sentence in report["unknown"]:
        print(f"Note: {sentence}")
    if report["left_out_annotators"]:
        print(f"Left out: {', '.join(report['left_out_annotators'][:10])}, by their z-scores")
    for found in pairs.values():
        if found["file"]:
            print(f"Pairs: {found['file']}, {found['pairs']:,} by {len(found['annotators'])} annotators")
    folder = Path(args.output_dir)
    print(f"Report: {folder / 'annotators.html'}" + (f"\nnext: {_next(folder, pairs)}" if pairs else ""))


def _next(folder: Path, pairs: dict[str, Any]) -> str:
    given = {"dataset_name": folder / "pairs", "model_name_or_path": "PATH_OR_HUB_NAME", "use_confidence": "true"}
    if not pairs.get("test", {}).get("file"):
        given["eval_size"] = max(1, pairs["train"]["pairs"] // 10)
    return shlex.join(["trl-ext", "reward", *(str(word) for name in given for word in (f"--{name}", given[name]))])


if __name__ == "__main__":
    main()
