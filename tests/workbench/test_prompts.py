"""`trl-ext prompts`: the report, the copies, the bounds, and what is refused."""

import json
import re
import sys
from datetime import datetime

import pytest
from datasets import Dataset

from trl_ext import load_dataset_split
from trl_ext.workbench.prompts.command import main, write_rows

LONG = "please write a short story about a brave knight who loses his sword in a dark and quiet forest"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """SFT and RL prompts that share one nearly with the evaluation set, and one exactly; pairs with SFT's answer."""
    monkeypatch.chdir(tmp_path)
    asked = [f"how do i get from place {i} to place {i * 7} before {i % 12} o'clock <b>&amp;" for i in range(60)]
    rl = [
        {"prompt": text, "topic": "ab"[i % 3 == 0], "x": i / 3}
        for i, text in enumerate([*asked, asked[3].upper(), ""])
    ]
    answer = "the quick brown fox jumps over the lazy dog and then it sleeps all day long"
    sets = {
        "rl": rl,
        "sft": [{"prompt": LONG, "completion": answer}, {"prompt": "b", "completion": "no"}],
        "pairs": [
            {"prompt": [{"role": "user", "content": "你好"}], "chosen": chosen, "rejected": "x"}
            for chosen in (answer, "other")
        ],
        "eval": [{"prompt": LONG.replace("brave", "shy")}, {"prompt": asked[5]}, {"prompt": "of its own"}],
    }
    for name, rows in sets.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def run(capsys, *words):
    """Exit status, what was printed, and the last line of errors."""
    try:
        main([*words])
        status = 0
    except SystemExit as error:
        status = error.code
    printed = capsys.readouterr()
    return status, printed.out, (printed.err.splitlines() or [""])[-1]


ALL = "--sets sft=sft.jsonl pairs=pairs.jsonl rl=rl.jsonl eval=eval.jsonl".split()


@pytest.mark.slow
def test_report_and_copies(folder, capsys):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    words = [*ALL, *"--split train=0.8 test=0.2 --stratify topic --split_sets rl --copied_from sft".split()]
    outputs = []
    for output in ("one", "two"):
        status, printed, _ = run(capsys, *words, "--output_dir", output)
        assert status == 0 and printed.startswith(f"Report: {output}/prompts.html\n")
        files = sorted((folder / output).rglob("*.*"))
        outputs.append({path.relative_to(folder / output).as_posix(): path.read_bytes() for path in files})
    assert outputs[0] == outputs[1]  # the seed decides
    assert {name: (folder / name).read_bytes() for name in before} == before
    found = json.loads(outputs[0]["prompts.json"])
    rl = found["sets"]["rl"]
    assert (rl["rows"], rl["empty"], rl["exact_duplicates"], rl["near_duplicates"], rl["kept"]) == (62, 1, 1, 1, 59)
    assert rl["left_out"] == {"empty": 1, "shared with a held-out set": 1, "duplicate": 1, "balance": 0}
    assert found["shared"]["eval"] == {
        "sft": {"exact": 0, "near": 1},
        "pairs": {"exact": 0, "near": 0},
        "rl": {"exact": 1, "near": 1},
    }
    assert found["sets"]["pairs"]["copied"] == {"answers": 1, "share": 0.5, "rows": [0]}
    assert found["sets"]["pairs"]["kept"] == 2 and found["sets"]["eval"]["kept"] == 3  # other answers; held out
    groups = [json.loads(line) for line in outputs[0]["duplicates.jsonl"].splitlines()]
    assert {"kind": "exact", "similarity": 1.0, "rows": {"rl": [5], "eval": [1]}} in groups and len(groups) == 4

    splits = {split: load_dataset_split("one/rl", split) for split in ("train", "test")}
    given = load_dataset_split("rl.jsonl").to_list()
    kept = [row for split in splits.values() for row in split.to_list()]
    assert sorted(row["x"] for row in kept) == [row["x"] for i, row in enumerate(given) if i not in (5, 60, 61)]
    assert all(row in given for row in kept) and abs(len(splits["test"]) - 12) <= 2
    assert load_dataset_split("one/sft.jsonl").to_list() == [{"prompt": "b", "completion": "no"}]
    assert (folder / "one/pairs.jsonl").read_text() == (folder / "two/pairs.jsonl").read_text() and "你好" in (
        folder / "one/pairs.jsonl"
    ).read_text()

    page = outputs[0]["prompts.html"].decode()
    assert "&lt;b&gt;&amp;amp;" in page and not re.search(r"<b>&amp;|<script|(src|href)=.http", page)
    for said in ("brave knight", "shy knight", "rl by topic", "Scripts and languages", "Copied answers", "<svg"):
        assert said in page


@pytest.mark.slow
def test_a_broken_bound_ends_with_one_sentence(folder, capsys):
    words = [*ALL, "--output_dir", "out", "--max_overlap", "eval=0.7", "--max_duplicates", "rl=0.01"]
    status, _, said = run(capsys, *words)
    assert status == 1 and said == (
        f"{said.split(':')[0]}: 1 of 62 rows of 'rl' (1.61%) have a duplicate before them in the set, "
        "the bound is 1.00%"
    )
    bounds = json.loads((folder / "out/prompts.json").read_text())["bounds"]
    assert [bound["broken"] for bound in bounds] == [False, True] and (folder / "out/rl.jsonl").is_file()
    status, _, said = run(capsys, *ALL, *"--output_dir x --write false --max_overlap eval=0 --copied_from sft".split())
    assert status == 1 and "2 of 3 rows of 'eval' (66.67%) have a duplicate in another set" in said
    assert sorted(path.name for path in (folder / "x").iterdir()) == [
        "duplicates.jsonl",
        "prompts.html",
        "prompts.json",
    ]
    assert run(capsys, *ALL, *"--output_dir y --copied_from sft --max_copied pairs=0.4".split())[0] == 1


def test_a_yaml_file_balance_and_parts(folder, capsys):
    (folder / "prompts.yaml").write_text(
        "sets: ['rl=rl.jsonl:train[:30]', eval=eval.jsonl]\noutput_dir: out\nbalance: [topic]\nby: last_turn\n"
    )
    assert run(capsys, "--config", "prompts.yaml")[0] == 0
    found = json.loads((folder / "out/prompts.json").read_text())["sets"]["rl"]
    assert found["rows"] == 30 and found["kept"] == 20 and found["left_out"]["balance"] == 9
    rows = load_dataset_split("out/rl.jsonl")["topic"][:]
    assert rows.count("a") == rows.count("b") == 10


@pytest.mark.slow
def test_sets_of_one_row_or_one_text(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "py3langid", None)
    for rows in (["a"], ["the same words again"] * 50, ["", ""], [None, "x"]):
        (folder / "s.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
        assert (
            run(capsys, "--sets", "s=s.jsonl", "--output_dir", "out", "--stratify", "length", "--split", "a=1")[0] == 0
        )
        kept = json.loads((folder / "out/prompts.json").read_text())["sets"]["s"]["kept"]
        assert kept == len({row for row in rows if row})
        assert "The table has scripts only, by Unicode" in (folder / "out/prompts.html").read_text()


def test_identical_texts_alone_may_be_duplicates(folder, capsys):
    status, printed, _ = run(capsys, *ALL, "--output_dir", "out", "--threshold", "1.0", "--held_out", "pairs")
    found = json.loads((folder / "out/prompts.json").read_text())["sets"]
    assert status == 0 and found["rl"]["near_duplicates"] == found["rl"]["exact_duplicates"] == 1
    assert found["eval"]["shared_near"] == 1  # the prompt that RL has; the knight's has another word


@pytest.mark.parametrize(
    "words, why",
    [
        (["eval=eval.jsonl"], None),
        (["eval=eval.jsonl", "--remove", "none"], "that held-out sets have, too, since `remove` is none"),
        (["test=eval.jsonl"], "that other sets have, too: name a set to evaluate on by `held_out`"),
    ],
)
def test_copies_to_train_on_that_have_what_is_evaluated_on_are_named(folder, capsys, words, why):
    _, printed, _ = run(capsys, "--sets", "rl=rl.jsonl", *words, "--output_dir", "out")
    said = [line for line in printed.splitlines() if line.startswith("the copy of 'rl'")]
    assert said == ([f"the copy of 'rl' keeps 1 rows {why}"] if why else [])


def test_what_json_does_not_have(folder, capsys):
    rows = {"prompt": ["a", "b"], "at": [datetime(2026, 1, 2), None], "score": [float("nan"), 1 / 3]}
    Dataset.from_dict(rows).to_parquet("s.parquet")
    assert run(capsys, "--sets", "s=s.parquet", "--output_dir", "out")[0] == 0
    lines = [json.loads(line) for line in (folder / "out/s.jsonl").read_text().splitlines()]
    assert lines == [
        {"prompt": "a", "at": "2026-01-02 00:00:00", "score": None},
        {"prompt": "b", "at": None, "score": 1 / 3},
    ]
    Dataset.from_dict({"prompt": ["a"], "picture": [b"x"]}).to_parquet("s.parquet")
    status, _, said = run(capsys, "--sets", "s=s.parquet", "--output_dir", "out")
    assert status == 2 and "a bytes cannot be written as JSON: leave its column out" in said


def test_mistakes_are_one_line(folder, capsys, subtests, monkeypatch):
    (folder / "latin.jsonl").write_bytes('{"prompt": "caf\xe9"}\n'.encode("latin-1"))
    (folder / "none.jsonl").write_text("")
    (folder / "odd.jsonl").write_text('{"prompt": 3}\n')
    (folder / "out/rl").mkdir(parents=True)
    (folder / "out/rl/old.jsonl").write_text("{}\n")
    rl = ["--sets", "rl=rl.jsonl", "--output_dir", "new"]
    for words, message in [
        (["--sets", "rl.jsonl", "--output_dir", "new"], "`sets`: write it as NAME=PATH, got 'rl.jsonl'"),
        (["--sets", "a/b=rl.jsonl", "--output_dir", "new"], "'a/b' must be fit for a file's name"),
        (["--sets", "a=rl.jsonl", "a=sft.jsonl", "--output_dir", "new"], "`sets` names 'a' twice"),
        (
            ["--sets", "Duplicates=rl.jsonl", "--output_dir", "new"],
            "the copy of 'Duplicates' would be new/Duplicates.jsonl, and overwrite the report's duplicates.jsonl",
        ),
        (["--sets", "prompts.json=rl.jsonl", "--split", "a=1", "--output_dir", "new"], "the report's prompts.json"),
        (
            [*"--sets a=rl.jsonl a.jsonl=sft.jsonl --split b=1 --split_sets a.jsonl --output_dir new".split()],
            "would be new/a.jsonl/b.jsonl, and overwrite the copy of 'a'",
        ),
        (["--sets", "a=absent.jsonl", "--output_dir", "new"], "no such file or folder"),
        (
            ["--sets", "a=latin.jsonl", "--output_dir", "new"],
            "set 'a': dataset 'latin.jsonl' cannot be read: line 1 of latin.jsonl is not UTF-8",
        ),
        (["--sets", "a=none.jsonl", "--output_dir", "new"], "it has no rows"),
        (["--sets", "a=odd.jsonl", "--output_dir", "new"], "must hold text or messages, but row 0 has 3"),
        (["--sets", "a=rl.jsonl:test", "--output_dir", "new"], "has no split 'test'; it has 'train'"),
        ([*rl, "--columns", "rl=question"], "set 'rl' lacks the column 'question'; it has 'prompt', 'topic', 'x'"),
        ([*rl, "--max_overlap", "evl=0"], "`max_overlap` names 'evl', which is not one of the sets rl"),
        ([*rl, "--max_overlap", "rl=2"], "the share of 'rl' must be from 0 to 1, got '2'"),
        ([*rl, "--max_copied", "rl=0"], "`max_copied` has an effect only with `copied_from`"),
        ([*rl, "--threshold", "0"], "`threshold` must be in (0, 1], got 0.0"),
        ([*rl, "--ngram", "0"], "`ngram` must be >= 1, got 0"),
        ([*rl, "--split", "train=0.5"], "shares must be above 0 and have the sum 1, got train=0.5"),
        ([*rl, "--stratify", "topic"], "`stratify` has an effect only with `split`"),
        ([*rl, "--split", "../a=0.5", "b=0.5"], "`split`: '../a' must be fit for a file's name"),
        ([*rl, "--split", "a=1", "--held_out", "rl"], "do not change held-out sets, and all sets are held out"),
        ([*rl, "--split", "a=1", "--stratify", "subject"], "lacks the column 'subject'"),
        ([*rl, "--balance", "x"], "62 different values in the column 'x'"),
        ([*rl, "--tresholds", "1"], "unknown flag '--tresholds'"),
        (["--sets", "rl=rl.jsonl", "--output_dir", "."], "`output_dir` . holds set 'rl'"),
        (["--sets", "rl=.", "--output_dir", "new"], "`output_dir` new lies in the folder of set 'rl'"),
        (["--sets", "rl=rl.jsonl", "--output_dir", "out"], "out/rl/old.jsonl is of an earlier run with other splits"),
    ]:
        with subtests.test(message=message):
            status, printed, said = run(capsys, *words)
            assert status == 2 and ": error: " in said and message in said and not printed, said
    monkeypatch.setattr("trl_ext.workbench.prompts.command.BYTES_A_ROW", 2**40)
    status, _, said = run(capsys, *rl)
    assert status == 2 and "62 rows need some 63488.0 GiB of memory" in said
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, "datasketch", None)
    status, _, said = run(capsys, *rl)
    assert status == 2 and "needs datasketch, which is not installed: `pip install 'trl-ext[labels]'`" in said


def test_a_shipped_configuration_and_an_interrupted_run(folder, capsys, monkeypatch):
    words = ["--config", "labels/prompts", "--sets", "rl=rl.jsonl", "eval=eval.jsonl", "--output_dir", "out"]
    status, _, said = run(capsys, *words)
    assert (
        status == 1
        and "of 'eval'" in said
        and {"train.jsonl", "test.jsonl"} == {path.name for path in (folder / "out/rl").iterdir()}
    )

    def write(path, rows):
        if path.stem == "test":
            raise KeyboardInterrupt
        write_rows(path, rows)

    monkeypatch.setattr("trl_ext.workbench.prompts.command.write_rows", write)
    with pytest.raises(KeyboardInterrupt):
        run(capsys, *words, "--seed", "1")
    assert [path.name for path in (folder / "out/rl").iterdir()] == ["train.jsonl"]  # not the other seed's test
