"""`reward_funcs:` of the recipes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from trl_ext.rewards import load_reward

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def repository_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_reward_is_loaded_by_name_or_file(subtests):
    for path in ["recipes.tinystories.rewards.repetition_reward", "recipes/tinystories/rewards.py:repetition_reward"]:
        with subtests.test(path=path):
            assert load_reward(path)(completions=["a b c a b c"]) == [-0.25]


def test_every_shipped_file_names_rewards_that_need_no_folder_on_the_path(subtests):
    for path in sorted(ROOT.glob("recipes/*/*.yaml")):
        with subtests.test(path=path):
            for name in yaml.safe_load(path.read_text()).get("reward_funcs", []):
                assert ".py:" in name or name.startswith("trl_ext.")
                assert callable(load_reward(name))


@pytest.mark.slow
def test_a_module_of_the_working_directory_is_found_without_its_folder_on_the_path(tmp_path):
    """As in `accelerate launch recipes/ppo.py`: Python looks in the script's folder, and not where it was started."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "scores.py").write_text(
        "def one(completions, **kwargs):\n    return [1.0] * len(completions)\n"
    )
    code = "from trl_ext.rewards import load_reward; print(load_reward('mine.scores.one')(['a', 'b']))"
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "run.py").write_text(code)
    run = subprocess.run(
        [sys.executable, "script/run.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.stdout == "[1.0, 1.0]\n", run.stderr


def test_unknown_reward_says_what_was_tried(subtests):
    for path, message in [
        (
            "absent.module.reward",
            "No module named 'absent'. Tried .* of 'absent.module' from .*path/to/file.py:",
        ),
        ("absent.py:reward", "No such file or directory: .*absent.py.* Tried 'reward' of 'absent.py' from "),
        ("recipes/tinystories/rewards.py:absent", "has no attribute 'absent'"),
        ("reward", "no module or no function is named"),
    ]:
        with subtests.test(path=path), pytest.raises(ImportError, match=message):
            load_reward(path)


def test_a_class_is_no_reward():
    with pytest.raises(ValueError, match=r"'pathlib\.Path' is of type type; name a function or an instance"):
        load_reward("pathlib.Path")
