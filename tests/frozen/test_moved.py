"""What has moved is imported, unpickled and told by its old name, too."""

import importlib.util
import inspect
import json
import os
import pickle
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import trl_ext
from tests.test_layers import imports, sources
from trl_ext.rewards import PatternReward, SumReward, source_identity
from trl_ext.upstream import moved

ROOT = Path(trl_ext.__file__).parents[1]
DATA = Path(__file__).parent / "data"
NAMES = json.loads((DATA / "names.json").read_text())  # of the package at 0.2.0: its modules, and what each defines
# Modules that are no more, and names without `_`, as `module.name`: what nobody outside has imported
GONE = {
    "trl_ext.upstream",  # a table of other packages' names, for trl_ext alone
    "trl_ext.checkpoints.newest_checkpoint",
    "trl_ext.commands.charts.look",
    "trl_ext.commands.main.several",
    *(f"trl_ext.commands.markup.{name}" for name in ("document", "none", "section", "table", "text", "tiles")),
    "trl_ext.commands.recorded.is_finite",
    "trl_ext.commands.reward_report_figures.finite",
    "trl_ext.commands.runbook.link",
    "trl_ext.data.annotators.outliers.sums",
    "trl_ext.marker.write_durably",
    "trl_ext.ppo.inputs.check_absent",
    "trl_ext.ppo.rollout.RolloutRecorder",
    "trl_ext.ppo.saved_rollouts.hold_out_prompts",  # of `trl_ext.data` now
    "trl_ext.ppo.evaluation.greedy_config",
    "trl_ext.ppo.rewards.checked",
    *(f"trl_ext.ppo.vllm.{name}" for name in ("keep_logprobs", "sampled")),
    "trl_ext.rewards.member.is_finite_number",
    "trl_ext.rewards.member.said_of",
    "trl_ext.rewards.service.mean",
}


@pytest.fixture
def move(monkeypatch):
    """`move(old=new, …)` has modules, classes and functions be elsewhere than at 0.2.0, by their names."""

    def moved_to(names):
        monkeypatch.setattr(moved, "MOVED", {**moved.MOVED, **names})

    before = set(sys.modules)
    yield moved_to
    for name in set(sys.modules) - before:
        if name.startswith("trl_ext."):
            del sys.modules[name]


def test_an_old_module_is_the_new_one(move):
    move({"trl_ext.old.patterns": "trl_ext.rewards.patterns", "trl_ext.old": "trl_ext.rewards"})
    with pytest.warns(
        FutureWarning, match=r"trl_ext.old.patterns is now trl_ext.rewards.patterns; .* in 0.4.0"
    ) as all_:
        from trl_ext.old.patterns import PatternReward as Old
    assert {warning.filename for warning in all_} == {__file__}
    assert Old is PatternReward
    # What is in a moved package comes along, and no file is loaded a second time
    with pytest.warns(FutureWarning, match="trl_ext.old.sum is now trl_ext.rewards.sum"):
        import trl_ext.old.sum
    assert trl_ext.old.sum is sys.modules["trl_ext.rewards.sum"] and trl_ext.old is trl_ext.rewards
    assert trl_ext.rewards.sum.__spec__.name == trl_ext.rewards.sum.__name__ == "trl_ext.rewards.sum"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        importlib.import_module("trl_ext.old.sum")  # it is said once
    with pytest.raises(ModuleNotFoundError, match="'trl_ext.old.none'.*under its new name 'trl_ext.rewards.none'"):
        importlib.import_module("trl_ext.old.none")


def test_an_old_module_whose_contents_went_to_several_places(move):
    move({"trl_ext.old": "trl_ext.rewards.patterns", "trl_ext.old.Total": "trl_ext.rewards.sum.SumReward"})
    with pytest.warns(FutureWarning):
        from trl_ext.old import PatternReward as Old
        from trl_ext.old import Total
    assert Old is PatternReward and Total is trl_ext.rewards.SumReward
    with pytest.raises(ImportError, match="Nothing"):
        from trl_ext.old import Nothing  # noqa: F401


def test_what_was_pickled_by_an_old_name_is_read(move):
    move({"trl_ext.old.patterns": "trl_ext.rewards.patterns", "trl_ext.old": "trl_ext.rewards"})
    written = pickle.dumps(PatternReward, protocol=0).replace(b"trl_ext.rewards.patterns", b"trl_ext.old.patterns")
    with pytest.warns(FutureWarning):
        assert pickle.loads(written) is PatternReward


# ---- Identities ----


@pytest.fixture
def elsewhere():
    """The module of `PatternReward`, as if its file lay elsewhere."""
    name = "trl_ext.rewards.elsewhere"
    spec = importlib.util.spec_from_file_location(name, sys.modules["trl_ext.rewards.patterns"].__file__)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


def told(module):
    """Identities that hold a class of ours: an instance's, a method's, one within another's, those of a user's own."""
    reward = getattr(module, "PatternReward", None) or module.Patterns
    doubled = type("Doubled", (reward,), {"__module__": "__main__", "factor": 2})

    def by_pattern(completions, **kwargs):
        return reward(["cat"])([], completions)

    rewards = [reward(["cat"]), reward(["cat"]).__call__, SumReward([reward(["cat"])]), doubled(["cat"]), by_pattern]
    return [source_identity(each) for each in [*rewards, module._compiled]]


def test_what_moved_is_told_as_before(move, elsewhere):
    before = told(sys.modules["trl_ext.rewards.patterns"])
    assert sum(old != new for old, new in zip(before, told(elsewhere), strict=True)) == 5
    move({"trl_ext.rewards.patterns": "trl_ext.rewards.elsewhere"})
    assert told(elsewhere) == before


def test_what_was_renamed_is_told_as_before(move, elsewhere):
    before = told(sys.modules["trl_ext.rewards.patterns"])
    elsewhere.Patterns = elsewhere.PatternReward
    del elsewhere.PatternReward
    elsewhere.Patterns.__qualname__ = "Patterns"
    elsewhere.Patterns.__call__.__qualname__ = "Patterns.__call__"
    move({"trl_ext.rewards.patterns.PatternReward": "trl_ext.rewards.elsewhere.Patterns"})
    assert told(elsewhere) == before


def test_of_two_modules_that_became_one_each_class_is_told_as_before(move):
    move({"trl_ext.one": "trl_ext.both", "trl_ext.two.B": "trl_ext.both.B", "trl_ext.two": "trl_ext.both"})
    assert moved.identity_name("trl_ext.both", "A.method") == ("trl_ext.one", "A.method")
    assert moved.identity_name("trl_ext.both", "B.method") == ("trl_ext.two", "B.method")
    move({"trl_ext.first": "trl_ext.first", "trl_ext.second": "trl_ext.first"})
    assert moved.identity_name("trl_ext.first", "A") == ("trl_ext.first", "A")
    assert moved.identity_name("mine.both", "A") == ("mine.both", "A")


def test_another_meaning_is_another_reward(monkeypatch):
    module = sys.modules["trl_ext.rewards.patterns"]
    before = told(module)
    monkeypatch.setattr(moved, "MEANING", {"trl_ext.rewards.patterns.PatternReward": 1})
    now = told(module)
    assert [old != new for old, new in zip(before, now, strict=True)] == [True] * 5 + [False]
    monkeypatch.setitem(moved.MEANING, "trl_ext.rewards.patterns.PatternReward", 2)
    assert told(module)[0] not in (before[0], now[0])


# ---- The names of 0.2.0 ----


def test_what_was_there_at_0_2_0_is_found_and_told_by_its_name(subtests):
    for name, contents in NAMES.items():
        if name in GONE:
            continue
        with subtests.test(module=name), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            module = importlib.import_module(name)
            for part in set(contents) - {part for part in contents if f"{name}.{part}" in GONE}:
                if part.startswith("__") or part.startswith("_") and not hasattr(module, part):
                    continue
                value = getattr(module, part)
                place, told_as = moved.identity_name(value.__module__, value.__qualname__)
                assert told_as == part and (place == name or not inspect.isclass(value)), f"{name}.{part}"


@pytest.mark.slow
def test_our_own_files_use_the_new_names():
    for path in [*sources("trl_ext"), *sources("recipes")]:
        old = [name for name in imports(path) if moved.new_name(name) != name]
        assert not old, f"{path} imports {old}"


@pytest.mark.slow
def test_checkpoints_of_0_2_0_go_on_after_a_move(tmp_path):
    """In a copy where a module is elsewhere and has other comments, imports and docstrings."""
    for folder in ("trl_ext", "recipes", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for path in (tmp_path / "trl_ext").rglob("*.py"):
        path.write_text(path.read_text().replace("pair_columns import", "known.beside import"))
    (tmp_path / "trl_ext/data/known").mkdir()
    (tmp_path / "trl_ext/data/known/__init__.py").touch()
    text = (tmp_path / "trl_ext/data/pair_columns.py").read_text()
    text = text.replace("    Adds what else is known of the pairs", "    Puts in what is known, too,", 1)
    (tmp_path / "trl_ext/data/known/beside.py").write_text(f"# another comment\nimport json  # noqa\n{text}")
    (tmp_path / "trl_ext/data/pair_columns.py").unlink()
    table = (tmp_path / "trl_ext/upstream/moved.py").read_text()
    begin = "MOVED: dict[str, str] = {"
    entry = '"trl_ext.data.pair_columns": "trl_ext.data.known.beside",'
    (tmp_path / "trl_ext/upstream/moved.py").write_text(table.replace(begin, begin + entry, 1))
    tests = [
        f"tests/frozen/test_runs.py::test_a_run_goes_on_by_the_same_command[{name}]" for name in ("dpo", "reward")
    ]
    tests.append("tests/frozen/test_runs.py::test_identities_are_those_of_0_2_0")
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
