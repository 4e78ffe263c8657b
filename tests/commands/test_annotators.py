"""`trl-ext annotators`: the report, the pairs, and what is refused in one line."""

import json
import re

import pytest

from tests.benchmarks.annotators import planted
from trl_ext import load_dataset_split
from trl_ext.commands.main import main

ROW = {"prompt": "p", "response_a": "x", "response_b": "y", "annotator": "ann", "choice": "a"}
GOOD = json.dumps(ROW).encode()


@pytest.fixture
def table(tmp_path):
    rows, _, _ = planted(60, seed=0)
    rows.to_json(tmp_path / "labels.jsonl")
    return tmp_path / "labels.jsonl"


def run(table, *words):
    return main(["annotators", "--dataset_name", str(table), "--output_dir", str(table.parent / "out"), *words])


def refusal(capsys, table, *words):
    with pytest.raises(SystemExit) as ended:
        run(table, *words)
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "trl-ext" in line)
    assert ended.value.code == 2
    return line


def test_report_and_pairs(table, capsys, tmp_path):
    before = table.read_bytes()
    settings = tmp_path / "labels.yaml"
    settings.write_text("seconds_column: seconds\ntime_column: time\nkeep_columns: [item]\n")
    assert run(table, "--config", str(settings)) == 0
    assert table.read_bytes() == before
    out = tmp_path / "out"
    report = json.loads((out / "annotators.json").read_text())
    page = (out / "annotators.html").read_text()
    assert "annotator 2" in report["left_out_annotators"] and "<script" not in page
    shown = capsys.readouterr().out
    assert f"α {report['alpha']:.3f}" in shown and "Left out: annotator" in shown and "trl-ext reward" in shown
    assert report["without_left_out"]["alpha"] > report["alpha"] and f"{report['alpha']:.3g}" in page

    splits = {name: load_dataset_split(out / "pairs", name) for name in ("train", "test")}
    people = {name: {who for row in rows["annotators"] for who in row} for name, rows in splits.items()}
    assert not people["train"] & people["test"] and len(people["test"]) == 4
    assert not {*splits["train"]["prompt"]} & {*splits["test"]["prompt"]}
    assert not {*report["left_out_annotators"]} & {*people["train"], *people["test"]}
    for name, rows in splits.items():
        assert {"prompt", "chosen", "rejected", "confidence", "weight", "votes", "item"} <= {*rows.column_names}
        assert report["pairs"][name]["pairs"] == len(rows) and min(rows["confidence"]) >= 0.6
        assert sum(rows["weight"]) / len(rows) == pytest.approx(1)


def test_an_earlier_test_file_does_not_stay(table, tmp_path):
    assert run(table) == 0 and (tmp_path / "out/pairs/test.jsonl").is_file()
    assert run(table, "--held_out_annotators", "0") == 0
    assert not (tmp_path / "out/pairs/test.jsonl").exists() and (tmp_path / "out/pairs/train.jsonl").is_file()


def test_the_report_alone(table, tmp_path):
    assert run(table, "--write_pairs", "false", "--min_zscore", "-100") == 0
    assert [*(tmp_path / "out").iterdir()] and not (tmp_path / "out/pairs").exists()
    assert "Left out" not in (tmp_path / "out/annotators.html").read_text()


def test_no_pair_is_an_error_with_a_report(tmp_path, capsys):
    table = tmp_path / "ties.jsonl"
    rows = [
        ROW | {"prompt": f"<b>p{i}", "annotator": f"<i>{who}", "choice": "tie"} for i in range(30) for who in "xyz"
    ]
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "no pair is left to train on" in refusal(capsys, table)
    page = (tmp_path / "out/annotators.html").read_text()
    assert "All labels are ties" in page and "<i>x" not in page and "&lt;i&gt;x" in page


@pytest.mark.parametrize(
    "content, words, message",
    [
        (GOOD, ["--choice_column", "label"], "lacks the column(s) 'label'; it has 'prompt'"),
        (GOOD, ["--choice_column", "choice", "--score_columns", "s", "t"], "but both are given"),
        (GOOD, ["--choice_values", "1", "2"], "holds 'a' in row 0, which is none of 1, 2"),
        (GOOD, ["--confidence_bound", "0.4"], "`confidence_bound` must be in [0.5, 1]"),
        (
            json.dumps(ROW).encode(),
            ["--write_pairs", "false", "--method", "mace"],
            "`method=mace` is for `write_pairs",
        ),
        (GOOD, ["--method", "mace"], "are too few"),
        (
            json.dumps(ROW | {"prompt": "é"}, ensure_ascii=False).encode("latin-1"),
            [],
            "line 1 of labels.jsonl is not UTF-8",
        ),
        (b"", [], "it has no rows"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, content, words, message):
    table = tmp_path / "labels.jsonl"
    table.write_bytes(content)
    assert message in re.sub(r"\s+", " ", refusal(capsys, table, *words))


def test_a_package_that_is_not_there_is_one_line(table, capsys, monkeypatch):
    monkeypatch.setattr("trl_ext.packages.is_installed", lambda package: package != "krippendorff")
    assert "needs krippendorff, which is not installed: `pip install 'trl-ext[labels]'`" in refusal(capsys, table)
    assert "holds the table" in refusal(capsys, table, "--output_dir", str(table.parent))
