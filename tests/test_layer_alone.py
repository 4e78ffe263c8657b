"""The first rule of the house: the layer works in a package that has neither the workbench nor the command line."""

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
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Run Python on a copy of package, tests and docs that lacks the two rooms; return what it prints."""
    folder = tmp_path_factory.mktemp("alone")
    ignored = shutil.ignore_patterns("__pycache__", "workbench", "cli")
    for name in ("trl_ext", "tests", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy2(ROOT / "pyproject.toml", folder)
    assert not (folder / "trl_ext/workbench").exists() and not (folder / "trl_ext/cli").exists()

    def run(*words, fails=False):
        ran = subprocess.run(
            [sys.executable, *map(str, words)],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=500,
        )
        shown = ran.stdout + ran.stderr
        assert (ran.returncode != 0) == fails, f"{words}: {ran.returncode}\n{shown[-8000:]}"
        return shown

    run.folder = folder
    return run


def test_ppo_trains_and_resumes_alone(alone):
    output = alone.folder / "run"
    shown = alone("-c", SCRIPT, alone.folder, output)
    assert "interrupted" in shown and "ended at step 8" in shown
    assert (output / "checkpoint-4").is_dir() and (output / "metrics.rank0.jsonl").is_file()
    assert not (output / "report.html").exists()
    assert "No page of this run was written: No module named 'trl_ext.workbench'" in shown


def test_the_command_lines_name_says_that_it_is_missing(alone):
    alone("-c", "import trl_ext; trl_ext.PPOConfig; dir(trl_ext)")
    shown = alone("-c", "import trl_ext; trl_ext.StrictTrlParser", fails=True)
    assert "ModuleNotFoundError: No module named 'trl_ext.cli'" in shown
