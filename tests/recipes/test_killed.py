"""Each recipe, killed by `kill -9` at random times and started again, ends as the uninterrupted run."""

import os
import subprocess
import sys

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from tests.recipes.small_runs import RECIPES, ROOT

pytestmark = pytest.mark.slow
KILLS = int(os.environ.get("TRL_EXT_TEST_KILLS", 2))  # set it higher by hand


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "ppo" else pytest.mark.extra) for name in RECIPES]
)
def test_killed_at_random_moments(name, tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "tests.recipes.small_runs", name, str(tmp_path), str(KILLS), "0"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    print(run.stdout)
    whole, *others = sorted(tmp_path.glob("run-*"))
    assert others
    for output in others:
        for file in whole.rglob("model.safetensors"):
            if "checkpoint-" not in str(file):
                again = load_file(output / file.relative_to(whole))
                assert_close(again, load_file(file), rtol=0, atol=0)
