import json

import pytest

from benchmarks import gpu


@pytest.mark.slow
def test_the_gpu_benchmark_runs_on_a_cpu(tmp_path, monkeypatch, capsys):
    out = tmp_path / "gpu.jsonl"
    monkeypatch.setattr("sys.argv", ["gpu", *f"--device cpu --sizes tiny --draws --out {out}".split()])
    gpu.main()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["settings"]["side"] for row in rows] == ["critic", "roles", "mean", "grpo"]
    assert len({tuple(row["lengths"]) for row in rows}) == 1  # the same work
    assert all(min(row["seconds"].values()) > 0 for row in rows)
    assert capsys.readouterr().out.count("| lora-tiny, varying | ") == 4
