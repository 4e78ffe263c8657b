"""The parts of the benchmark that its tables stand on; its runs are no test."""

import json

import pytest

from tests.benchmarks.dpo import cached, flip, mean_interval


def test_intervals_are_student_s():
    # Mean 3, standard deviation √2.5, t(4) = 2.776: 2.776·√(2.5/5) = 1.963
    assert mean_interval([1.0, 2.0, 3.0, 4.0, 5.0], "+.3f") == "+3.000 ± 1.963"


def test_a_finished_run_is_not_run_again(tmp_path):
    calls = []
    for _ in range(2):
        assert cached(tmp_path / "a" / "run.json", lambda: calls.append(1) or {"gold": 0.5}) == {"gold": 0.5}
    assert calls == [1]


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_labels_are_flipped_in_training_only(share, tmp_path):
    (tmp_path / "source").mkdir()
    for split in ("train", "test"):
        rows = [{"prompt": str(i), "chosen": "good", "rejected": "bad"} for i in range(40)]
        (tmp_path / "source" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    target = flip(tmp_path / "source", tmp_path / "target", share, seed=1)
    read = {
        s: [json.loads(line) for line in (target / f"{s}.jsonl").read_text().splitlines()] for s in ("train", "test")
    }
    assert sum(row["chosen"] == "bad" for row in read["train"]) == 40 * share
    assert all({row["chosen"], row["rejected"]} == {"good", "bad"} for row in read["train"])
    assert [row["prompt"] for row in read["train"]] == [str(i) for i in range(40)]
    assert all(row["chosen"] == "good" for row in read["test"])
