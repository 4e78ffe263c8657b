import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_rows_of_a_gpu_are_rehearsed_on_a_cpu(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--sizes", "tiny", "--draws"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "gpu.jsonl")], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert [row["settings"]["side"] for row in rows] == ["critic", "mean", "grpo"]
    assert len({tuple(row["lengths"]) for row in rows}) == 1  # the same work
    assert all(min(row["seconds"].values()) > 0 for row in rows)
    assert done.stdout.count("| lora-tiny, varying | ") == 3
