"""The first rule of the house: the layer works in a package that has neither the workbench nor the command line."""

import ast
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.test_layers import LAYER, ROOT

# What a test's source has if it imports, names or starts what is above the layer
ABOVE = re.compile(r"\bworkbench\b|\btrl_ext\.cli\b|\bStrictTrlParser\b|\brecipes?\b|\btrl-ext\b")
TRAINS = re.compile(r"\.train\(|\btrained\(|\bmake_trainer\b|\bsubprocess\b")  # takes longer; `SCRIPT` trains

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


def with_helpers(path):
    """The sources of a test file and of what it imports from `tests`."""
    found = [path]
    for each in found:
        for node in ast.walk(ast.parse(each.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "tests":
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                paths = [ROOT / f"{name.replace('.', '/')}.py" for name in names]
                found += [path for path in paths if path.is_file() and path not in found]
    return [each.read_text() for each in found]


def fast_tests_of_the_layer():
    """Test files of the layer's rooms that neither need what is above it, nor train: every third of a room, or all."""
    found, step = [], 1 if os.environ.get("TRL_EXT_ALL_CASES") else 3
    for room in LAYER:
        files = sorted((ROOT / "tests" / room).glob("test_*.py"))
        found += [
            path.relative_to(ROOT)
            for path in files
            if not TRAINS.search(path.read_text()) and not any(ABOVE.search(text) for text in with_helpers(path))
        ][::step]
    return found


def test_the_layers_own_tests_pass_alone(alone):
    files = fast_tests_of_the_layer()
    rooms = {path.parts[1] for path in files}
    assert rooms >= {"functional", "models", "runs", "data", "evaluation", "rewards", "callbacks", "ppo", "dpo"}, rooms
    shown = alone("-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", *files)
    passed = re.search(r"(\d+) passed", shown)
    assert passed and int(passed[1]) >= 150, shown[-2000:]


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
