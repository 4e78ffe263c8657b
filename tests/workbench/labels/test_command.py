"""`trl-ext annotators`: the report, the pairs, and one-line errors."""

import json
import re
from itertools import permutations

import pytest

from tests.workbench.labels.planted import planted
from trl_ext import load_dataset_split
from trl_ext.cli.main import main
from trl_ext.data import write_rows

ROW = {"prompt": "p", "response_a": "x", "response_b": "y", "annotator": "ann", "choice": "a"}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("labels")
    planted(30, seed=0)[0].to_json(folder / "labels.jsonl")
    return folder / "labels.jsonl"


@pytest.fixture(scope="module")
def reported(table):
    """The folder of a run with a fifth of the annotators held out."""
    before = table.read_bytes()
    assert run(table, "--keep_columns", "item", output=table.parent / "out") == 0
    assert table.read_bytes() == before
    return table.parent / "out"


def run(table, *words, output=None):
    output = output or table.parent / "out"
    return main(["annotators", "--dataset_name", str(table), "--output_dir", str(output), *words])


def refusal(capsys, table, *words):
    with pytest.raises(SystemExit, match="2"):
        run(table, *words)
    return capsys.readouterr().err


def test_report_and_pairs(reported):
    report = json.loads((reported / "annotators.json").read_text())
    page = (reported / "annotators.html").read_text()
    assert "annotator 2" in report["left_out_annotators"] and "annotator 2, left out" in page
    assert report["without_left_out"]["alpha"] > report["alpha"] and f"{report['alpha']:.3f}" in page
    assert "Choose the answer shown first more often" in page and "annotator 1 (+" in page  # the lazy ones
    matrix = page[page.index('class="matrix"') : page.index("Hover for")]
    for row in (row for row in report["kappas"] if row["kappa"] is not None):  # twice in the matrix
        shown = rf'title="{{}}, {{}}: {row["items"]} shared"[^>]*>{row["kappa"]:.2f}<'
        assert all(re.search(shown.format(*pair), matrix) for pair in permutations(row["annotators"]))
    assert re.findall('scope="row">([^<]*)<', matrix)[-1] == "annotator 2"  # the adversarial ones agree least

    splits = {name: load_dataset_split(reported / "pairs", name) for name in ("train", "test")}
    people = {name: {who for row in rows["annotators"] for who in row} for name, rows in splits.items()}
    assert not people["train"] & people["test"] and len(people["test"]) == 4
    assert not {*splits["train"]["prompt"]} & {*splits["test"]["prompt"]}
    assert not {*report["left_out_annotators"]} & {*people["train"], *people["test"]}
    for name, rows in splits.items():
        assert {"prompt", "chosen", "rejected", "confidence", "weight", "votes", "item"} <= {*rows.column_names}
        assert report["pairs"][name]["pairs"] == len(rows) and min(rows["confidence"]) >= 0.6
        assert sum(rows["weight"]) / len(rows) == pytest.approx(1)


def test_without_a_pair_there_is_an_error_and_a_report(tmp_path, capsys):
    rows = [ROW | {"prompt": f"<b>p{i}", "annotator": f"<i>{w}", "choice": "tie"} for i in range(30) for w in "xyz"]
    write_rows(tmp_path / "ties.jsonl", rows)
    assert "no pair is left to train on" in refusal(capsys, tmp_path / "ties.jsonl")
    page = (tmp_path / "out/annotators.html").read_text()
    assert "α is not defined" in page and "<i>x" not in page and "&lt;i&gt;x" in page


def test_arguments_that_would_train_wrongly_or_overwrite_are_refused(table, capsys):
    for words, message in (
        (["--choice_values", "1", "2"], "in row 0, not one of 1, 2"),
        (["--keep_columns", "weight"], "`keep_columns` names 'weight', but pairs"),
        (["--output_dir", str(table.parent)], "holds the table"),
    ):
        assert message in refusal(capsys, table, *words)


@pytest.mark.slow
def test_a_shipped_configuration_for_rankings(tmp_path):
    ranks = {(f"p{i}", f"r{j}"): (i + j) % 3 for i in range(20) for j in range(3)}
    rows = [
        {"prompt": prompt, "response": answer, "annotator": who, "rank": rank}
        for (prompt, answer), rank in ranks.items()
        for who in "xyz"
    ]
    write_rows(tmp_path / "ranked.jsonl", rows)
    assert run(tmp_path / "ranked.jsonl", "--config", "labels/rankings") == 0
    pairs = load_dataset_split(tmp_path / "out/pairs")
    assert all(ranks[p["prompt"], p["chosen"]] < ranks[p["prompt"], p["rejected"]] for p in pairs)


def test_an_interrupted_run_leaves_no_old_test_split(reported, table, monkeypatch):
    """The old test split would have people of the new training split."""

    def write(path, rows):
        if path.stem == "test":
            raise KeyboardInterrupt
        write_rows(path, rows)

    assert (reported / "pairs/test.jsonl").exists()
    monkeypatch.setattr("trl_ext.workbench.labels.command.write_rows", write)
    assert run(table, "--seed", "1") == 130
    assert [path.name for path in (reported / "pairs").iterdir()] == ["train.jsonl"]
