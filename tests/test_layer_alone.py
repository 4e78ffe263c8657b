"""The layer works in a package without the workbench and the command line."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.test_layers import ROOT

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
from pathlib import Path

import trl_ext
from tests.tiny import length_reward, prompts, tiny_config, tiny_llama, tiny_tokenizer
from transformers import TrainerCallback
from trl_ext.callbacks import EntropyFloorCallback

copy, output = sys.argv[1:]
assert Path(trl_ext.__file__).is_relative_to(copy), trl_ext.__file__


class Interrupt(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 4:
            raise KeyboardInterrupt


def trainer(*callbacks):
    args = tiny_config(output, record_run=True, max_steps=8, save_strategy="steps", save_steps=4)
    return trl_ext.PPOTrainer(
        model=tiny_llama(),
        reward_funcs=length_reward,
        args=args,
        train_dataset=prompts(),
        processing_class=tiny_tokenizer(),
        callbacks=[EntropyFloorCallback(), *callbacks],
    )


try:
    trainer(Interrupt()).train()
except KeyboardInterrupt:
    print("interrupted")
resumed = trainer()
resumed.train(resume_from_checkpoint=True)
print("ended at step", resumed.state.global_step)
dir(trl_ext)
trl_ext.StrictTrlParser
"""


def test_ppo_trains_and_resumes_alone_and_missing_parts_are_named(tmp_path):
    """On a copy of package, tests and docs without the two, in one process."""
    ignored = shutil.ignore_patterns("__pycache__", "workbench", "cli")
    for name in ("trl_ext", "tests", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    shutil.copy2(ROOT / "pyproject.toml", tmp_path)
    assert not (tmp_path / "trl_ext/workbench").exists() and not (tmp_path / "trl_ext/cli").exists()
    output, environment = tmp_path / "run", os.environ | {"PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(output)]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
    shown = ran.stdout + ran.stderr
    assert "interrupted" in shown and "ended at step 8" in shown, shown[-8000:]
    assert (output / "checkpoint-4").is_dir() and (output / "metrics.rank0.jsonl").is_file()
    assert not (output / "report.html").exists()
    assert "No page of this run was written: No module named 'trl_ext.workbench'" in shown
    assert ran.returncode == 1 and shown.endswith("ModuleNotFoundError: No module named 'trl_ext.cli'\n")
