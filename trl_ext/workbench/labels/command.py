"""Report how far annotators agree and who differs from the others, then make preference pairs from their labels.

    trl-ext annotators --dataset_name labels.jsonl --output_dir outputs/labels

The table is long (one row for each label), or wide (one row for each pair, with a column for each annotator,
--annotator_columns), or it ranks answers, several in a row or one in each row (--score_columns). The report is
`annotators.html` and `annotators.json`. Then pairs for `trl-ext reward` and `trl-ext dpo` are written:
`pairs/train.jsonl`, and `pairs/test.jsonl`, whose labels are by other annotators. The table is not changed.
"""

import json
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np

from ...cli.parser import StrictTrlParser
from ...data import write_rows
from ...runs import check_output_dir, check_settings, find, overlap, setting, write_text
from ...upstream import quiet
from ..pages.markup import number, percent, render, with_interval

_OWN = {"prompt", "chosen", "rejected", "confidence", "weight", "votes", "annotators"}
_LEAN = (0.05, 4)  # share and z-score beyond which a lean is named


@dataclass
class AnnotatorsArguments:
    """
    Declare the arguments of `trl-ext annotators`: the table's columns, which labels count, and how they are
    aggregated.
    """

    dataset_name: str = field(metadata={"help": "The table: a .jsonl, .csv or .parquet file, a folder, a hub name."})
    output_dir: str = field(metadata={"help": "Folder for the report and the pairs."})
    dataset_config: str | None = setting(None, "Configuration of a hub dataset.")
    dataset_split: str = setting("train", "Split, or a part of one as `train[:50%]`.")
    prompt_columns: list[str] = field(
        default_factory=lambda: ["prompt"],
        metadata={"help": "Column of the prompt, or several columns, whose texts are joined by an empty line."},
    )
    response_columns: list[str] = field(
        default_factory=lambda: ["response_a", "response_b"],
        metadata={
            "help": "Columns of the two answers in the order shown; of all answers if they are ranked; or one column "
            "if a row has one answer."
        },
    )
    annotator_column: str = setting("annotator", "Column that names the annotator, in a long table.")
    choice_column: str = setting("choice", "Column of the choice, in a long table.")
    score_columns: list[str] | None = setting(None, "Columns of scores, one for each answer, in place of choices.")
    lowest_wins: bool = setting(False, "Scores are ranks: 1 is the best.")
    annotator_columns: list[str] | None = setting(None, "Columns of choices, one for each annotator, in a wide table.")
    choice_values: list[str] = field(
        default_factory=lambda: ["a", "b", "tie"],
        metadata={
            "help": "Values of a choice that mean the first answer, the second answer, and (all further values) a tie."
        },
    )
    keep_columns: list[str] | None = setting(None, "Further columns to keep in the pairs, such as a topic.")
    method: Literal["majority", "noisy_bt"] = setting(
        "majority",
        "How a pair's labels are aggregated: by votes, or by scores of the answers and how reliable each annotator is "
        "(noisy Bradley-Terry, for rankings).",
    )
    confidence_bound: float = setting(
        0.6,
        "Least share of an item's labels, or probability, that its winner must have.",
        range="in [0.5, 1], a share of labels",
    )
    min_labels: int = setting(1, "Least number of labels of a pair.", range=">= 1")
    min_zscore: float | None = setting(
        -3.0, "Annotators with a lower z-score of agreement are left out; null keeps all."
    )
    held_out_annotators: float = setting(
        0.2,
        "Share of annotators whose pairs are only for testing; 0 for no test pairs.",
        range="in [0, 1), a share of annotators",
    )
    seed: int = setting(0, "Seed of the bootstrap and of the held-out annotators.")

    def __post_init__(self) -> None:
        check_settings(self)
        if own := {*(self.keep_columns or ())} & _OWN:
            raise ValueError(
                f"`keep_columns` names {min(own)!r}, but pairs already have a column of that name: rename the column "
                "in the table"
            )


def report_labels(args: AnnotatorsArguments) -> dict[str, Any]:
    """
    Write the report and the pairs, and return the content of `annotators.json`.

    Raises:
        ValueError: the table lacks a column or the split, or its labels cannot be read; the table lies in the output
            folder, or contains it; or no pair is left to train on. The report, which is written before, says why no
            pair is left.
    """
    from ...data import load_dataset_split
    from . import Columns, agreement_report, hold_out_annotators, read_labels

    folder = Path(args.output_dir)
    table = find(args.dataset_name)
    if table.exists() and (why := overlap(folder, table)):
        raise ValueError(f"`output_dir` {folder} {why} the table {args.dataset_name}: choose another folder")
    prompt, *more = args.prompt_columns
    columns = Columns(
        prompt=prompt,
        responses=tuple(args.response_columns),
        annotator=args.annotator_column,
        choice=args.choice_column,
        annotators=tuple(args.annotator_columns or ()),
        scores=tuple(args.score_columns or ()),
        lowest_wins=args.lowest_wins,
        values=tuple(map(str, args.choice_values)),
    )
    wanted = [*columns.names, *more, *(args.keep_columns or ())]
    dataset = load_dataset_split(args.dataset_name, args.dataset_split, config=args.dataset_config, columns=wanted)
    if more:
        dataset = dataset.map(lambda row: {prompt: "\n\n".join(row[name] for name in (prompt, *more) if row[name])})
    labels = read_labels(dataset, columns)
    report: dict[str, Any] = {"settings": asdict(args), **agreement_report(labels, args.seed)}
    least = -np.inf if args.min_zscore is None else args.min_zscore
    off = {row["annotator"] for row in report["annotators"] if row["z"] is not None and row["z"] < least}
    if off:
        annotators = np.array(labels.annotators, object)[labels.annotator]
        labels = labels.where(~np.isin(annotators, list(off)))
        without = agreement_report(labels, args.seed)
        report["without_left_out"] = {name: without[name] for name in ("labels", "alpha", "alpha_interval")}
    report |= {"left_out_annotators": sorted(off), "pairs": {}}
    # An earlier run's test pairs must not stand beside training pairs by the same annotators if this run is killed
    (folder / "pairs" / "test.jsonl").unlink(missing_ok=True)
    train, test = hold_out_annotators(labels, args.held_out_annotators, args.seed)
    # Test pairs are made by votes alone, so that they do not rest on a model's guess
    for split, part, method in (("train", train, args.method), ("test", test, "majority")):
        if part is not None:
            report["pairs"][split] = _write_pairs(
                folder / "pairs" / f"{split}.jsonl", dataset, part, columns, args, method
            )
    write_text(folder / "annotators.json", json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    write_text(folder / "annotators.html", page(report))
    if not report["pairs"]["train"]["pairs"]:
        raise ValueError(f"no pair is left to train on: {folder / 'annotators.html'} says why")
    return report


def _write_pairs(
    path: Path, dataset: Any, labels: Any, columns: Any, args: AnnotatorsArguments, method: Any
) -> dict[str, Any]:
    """
    Write the pairs of one split, and return their entry in the report.

    Args:
        path: the file to write.
        dataset: the rows with prompts and answers.
        labels: the labels of this split.
        columns: the names of the columns, [`Columns`].
        args: the command's arguments.
        method: how labels become a probability, as `shares_of_labels` takes it.

    Returns:
        The `file` (None without pairs), the number of `pairs`, their mean `confidence`, the names of the `annotators`,
        and the number of items that are `left_out`, by reason.
    """
    from . import majority_pairs, shares_of_labels

    left_out: dict[str, int] = {}
    pairs = [
        *majority_pairs(
            dataset,
            labels,
            columns,
            shares=shares_of_labels(labels, method),
            confidence_bound=args.confidence_bound,
            min_labels=args.min_labels,
            keep_columns=args.keep_columns or (),
            left_out=left_out,
        )
    ]
    write_rows(path, pairs)
    if not pairs:
        path.unlink()  # a file without a row cannot be loaded
    return {
        "file": str(path) if pairs else None,
        "pairs": len(pairs),
        "confidence": float(np.mean([pair["confidence"] for pair in pairs])) if pairs else None,
        "annotators": sorted(labels.annotators[place] for place in np.unique(labels.annotator)),
        "left_out": {reason: number for reason, number in left_out.items() if number},
    }


def page(report: dict[str, Any]) -> str:
    """Return the HTML page of a report that [`report_labels`] returned."""
    people = report["annotators"]
    off = report["left_out_annotators"]
    findings = []
    if off:
        findings.append(
            f"Left out, with a z-score below {report['settings']['min_zscore']:g}: {', '.join(off)}. α without them: "
            f"{number(report['without_left_out']['alpha'], 3)}."
        )
    lean = [row for row in people if abs(row["lean"] or 0) > _LEAN[0] and abs(row["lean_z"] or 0) > _LEAN[1]]
    if lean:
        shown = ", ".join(f"{row['annotator']} ({row['lean']:+.0%})" for row in lean)
        findings.append(
            f"Choose the answer shown first more often (+) or less often (-) than others on the same pairs: {shown}."
        )
    if report["repeats"]:
        findings.append(
            f"Labels that repeat an earlier one by the same annotator on the same pair: {report['repeats']:,}. Equal "
            f"labels count once. Labels that contradict each other ({report['contradictions']:,} times) do not count."
        )
    return render(
        Path(__file__).with_name("page.html.j2"),
        title="Annotators",
        report=report,
        tiles={
            "Krippendorff's α": with_interval(report["alpha"], report["alpha_interval"], ".3f"),
            "two labels agree": percent(report["agreement"]),
            "ties": percent(report["ties"]),
            "answer shown first wins": percent(report["shown_first"]),
            "labels": f"{report['labels']:,}",
            "without a label": f"{report['missing']:,}",
            "pairs of answers": f"{report['items']:,}",
            "annotators": f"{len(people):,}",
        },
        findings=findings,
        kappas=kappa_matrix(report["kappas"]),
    )


def kappa_matrix(kappas: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """
    Return the entries of `kappas`, which [`agreement_report`] returned, by the names of their two annotators.

    `result[a][b]` and `result[b][a]` are the entry of a and b. The annotator with the highest mean κ comes first.
    """
    matrix: dict[str, dict[str, dict[str, Any]]] = {}
    for row in kappas:
        a, b = row["annotators"]
        matrix.setdefault(a, {})[b] = matrix.setdefault(b, {})[a] = row
    mean = {name: fmean(row["kappa"] or 0 for row in of.values()) for name, of in matrix.items()}
    return {name: matrix[name] for name in sorted(matrix, key=mean.__getitem__, reverse=True)}


def main(arguments: list[str] | None = None) -> None:
    quiet()
    parser = StrictTrlParser(AnnotatorsArguments, without_arguments=__doc__)
    (args,) = parser.parse_args_and_config(arguments)
    with parser.one_line_errors():
        check_output_dir(args.output_dir, None)
        report = report_labels(args)
    said = with_interval(report["alpha"], report["alpha_interval"], ".3f", "not known")
    print(f"Labels: {report['labels']:,}; annotators: {len(report['annotators'])}; Krippendorff's α: {said}")
    for sentence in report["unknown"]:
        print(f"Note: {sentence}")
    if report["left_out_annotators"]:
        print(f"Annotators left out for their z-scores: {', '.join(report['left_out_annotators'])}")
    for found in report["pairs"].values():
        if found["file"]:
            print(f"Pairs: {found['pairs']:,}, labelled by {len(found['annotators'])} annotators, in {found['file']}")
    folder = Path(args.output_dir)
    given = {"dataset_name": folder / "pairs", "model_name_or_path": "PATH_OR_HUB_NAME", "use_confidence": "true"}
    if not report["pairs"].get("test", {}).get("file"):
        given["eval_size"] = max(1, report["pairs"]["train"]["pairs"] // 10)
    words = [str(word) for name, value in given.items() for word in (f"--{name}", value)]
    print(f"Report: {folder / 'annotators.html'}\nnext: {shlex.join(['trl-ext', 'reward', *words])}")


if __name__ == "__main__":
    main()
