"""`trl-ext annotators`: the report, the pairs, and what is refused in one line."""

import json
import re

import pytest

from tests.workbench.labels.planted import planted
from trl_ext import load_dataset_split
from trl_ext.cli.main import main
from trl_ext.workbench.prompts.command import write_rows

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


@pytest.mark.slow
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
    assert "Take less than a third of the" in page and ": annotator 1 (4 s)." in page  # who is lazy
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


@pytest.mark.slow
def test_an_earlier_test_file_does_not_stay(table, tmp_path):
    assert run(table) == 0 and (tmp_path / "out/pairs/test.jsonl").is_file()
    assert run(table, "--held_out_annotators", "0") == 0
    assert not (tmp_path / "out/pairs/test.jsonl").exists() and (tmp_path / "out/pairs/train.jsonl").is_file()


@pytest.mark.slow
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
        (GOOD, ["--choice_values", "1", "2"], "holds 'a' in row 0, not one of 1, 2"),
        (GOOD, ["--confidence_bound", "0.4"], "`confidence_bound` must be in [0.5, 1]"),
        (
            json.dumps(ROW).encode(),
            ["--write_pairs", "false", "--method", "mace"],
            "`method=mace` needs `write_pairs",
        ),
        (GOOD, ["--method", "mace"], "it needs 2 labels for an item and 10 of the median"),
        (
            json.dumps(ROW | {"prompt": "é"}, ensure_ascii=False).encode("latin-1"),
            [],
            "line 1 of labels.jsonl is not UTF-8",
        ),
        (b"", [], "it has no rows"),
        (GOOD, ["--keep_columns", "weight"], "`keep_columns` names 'weight', but pairs have"),
        (GOOD, ["--keep_columns", "topic"], "`keep_columns`: the table has no column 'topic'"),
        (GOOD, ["--response_columns", "response_a"], "scores must name one column for each response"),
        (GOOD, ["--response_columns", "response_a", "response_a"], "prompt columns and different response columns"),
        (GOOD, ["--lowest_wins", "true"], "lowest_wins is for scores, but no column of scores is named"),
        (
            json.dumps(ROW | {"response_a": 42}).encode(),
            [],
            "'response_a' must hold text or messages, but it holds int",
        ),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, content, words, message):
    table = tmp_path / "labels.jsonl"
    table.write_bytes(content)
    assert message in re.sub(r"\s+", " ", refusal(capsys, table, *words))


def test_a_package_that_is_not_there_is_one_line(table, capsys, monkeypatch):
    monkeypatch.setattr("trl_ext.upstream.packages.is_installed", lambda package: package != "krippendorff")
    assert "needs krippendorff, which is not installed: `pip install 'trl-ext[labels]'`" in refusal(capsys, table)
    assert "holds the table" in refusal(capsys, table, "--output_dir", str(table.parent))
    inside = ["--dataset_name", str(table.parent), "--output_dir", str(table.parent / "out")]
    assert "lies in the folder of the table" in refusal(capsys, table, *inside)


# ---- What ships ----


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
def test_shipped_configurations_run(table, tmp_path, capsys):
    """From any folder, with a table of the columns that each names."""
    texts = [{"prompt": f"p{i}", "instruction": f"p{i}", "input": "", "item_id": i} for i in range(20)]
    wide = [
        row | {"response1": "x", "response2": "y"} | {f"annotator{j}": i % 3 for j in (1, 2, 3)}
        for i, row in enumerate(texts)
    ]
    ranked = [
        {"prompt": f"p{i}", "response": f"r{j}", "annotator": who, "rank": (i + j) % 3}
        for i in range(20)
        for j in range(3)
        for who in "xyz"
    ]
    tables = {"annotators": table, "pandalm": written(tmp_path / "wide.jsonl", wide)}
    tables |= {"rankings": written(tmp_path / "ranked.jsonl", ranked)}
    for name, rows in tables.items():
        out = tmp_path / name
        main(["annotators", "--config", f"labels/{name}", "--dataset_name", str(rows), "--output_dir", str(out)])
        assert len(load_dataset_split(out / "pairs", columns=("prompt", "chosen", "rejected", "confidence"))) > 5
    assert f"--dataset_name {tmp_path}/pandalm/pairs" in (shown := capsys.readouterr().out)
    assert " --eval_size 1" in shown.split("pandalm/annotators.html")[1].split("\n")[1]  # nobody was held out
    pairs = load_dataset_split(tmp_path / "rankings/pairs")
    rank = {(row["prompt"], row["response"]): row["rank"] for row in ranked}
    assert all(rank[p["prompt"], p["chosen"]] < rank[p["prompt"], p["rejected"]] for p in pairs)


@pytest.mark.slow
def test_an_interrupted_run_leaves_no_test_of_another_one(table, tmp_path, monkeypatch):
    """People whom the new file trains on would be in the old test."""
    assert run(table) == 0

    def write(path, rows):
        if path.stem == "test":
            raise KeyboardInterrupt
        write_rows(path, rows)

    monkeypatch.setattr("trl_ext.workbench.labels.command.write_rows", write)
    assert run(table, "--seed", "1") == 130
    assert [path.name for path in (tmp_path / "out/pairs").iterdir()] == ["train.jsonl"]


def test_kept_columns_of_any_kind(tmp_path):
    rows = [ROW | {"prompt": f"p{i}", "annotator": who, "at": "2026-01-02T03:04:05", "x": None if i else 0.5}
            for i in range(9) for who in "uvw"]  # fmt: skip
    assert run(written(tmp_path / "labels.jsonl", rows), "--keep_columns", "at", "x", "--time_column", "at") == 0
    made = [json.loads(line) for line in (tmp_path / "out/pairs/train.jsonl").read_text().splitlines()]
    assert {row["at"] for row in made} == {"2026-01-02 03:04:05"} and {row["x"] for row in made} <= {None, 0.5}


def test_scores_may_be_text(tmp_path, capsys):
    """As one word in a column of a CSV file makes all of it."""
    rows = [ROW | {"prompt": f"p{i}", "s": "2", "t": " 10.5"} for i in range(9)]
    words = ["--score_columns", "s", "t"]
    assert run(written(tmp_path / "labels.jsonl", rows), *words) == 0
    assert (tmp_path / "out/pairs/train.jsonl").read_text().count('"chosen": "y"') == 9
    rows[4]["t"] = "none"
    assert "'t' must hold numbers, but row 4 has 'none'" in refusal(
        capsys, written(tmp_path / "labels.jsonl", rows), *words
    )
