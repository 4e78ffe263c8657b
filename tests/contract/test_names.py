"""The tables of `upstream/names.py` name what we use, and a change upstream is reported in one sentence."""

import ast
import inspect
import re
from pathlib import Path

import pytest
import trl
from trl.trainer import utils

import trl_ext
from tests.contract.observed import grpo, require
from tests.dpo.worker import make_trl_trainer
from trl_ext import DPOTrainer, PPOTrainer
from trl_ext.cli import contract as command
from trl_ext.upstream.contract import assigned
from trl_ext.upstream.names import ATTRIBUTES, METHODS, NAMES, TESTED, check_contract
from trl_ext.upstream.statements import temporarily

PACKAGE = Path(trl_ext.__file__).parent
TRAINERS = [(PPOTrainer, trl.GRPOTrainer), (DPOTrainer, trl.DPOTrainer)]
check_now = check_contract.__wrapped__  # not the cached result


def ours(trainer):
    return [cls for cls in trainer.__mro__ if cls.__module__.startswith("trl_ext.")]


def files_of(trainer):
    """Its folder, and the files of its base classes elsewhere in the package."""
    return {
        *Path(inspect.getfile(trainer)).parent.glob("*.py"),
        *(Path(inspect.getfile(cls)) for cls in ours(trainer)),
    }


@pytest.mark.slow
def test_upstream_has_what_we_use():
    changes = "; ".join(filter(None, command.changes().values()))
    assert not changes, f"Upstream changed: {changes}. Follow it, and correct the tables of trl_ext/upstream/names.py."


@pytest.mark.parametrize("trainer, base", TRAINERS)
def test_tables_name_nothing_unused(trainer, base):
    path, code = f"trl.{base.__name__}", "".join(file.read_text() for file in files_of(trainer))
    unused = [name for name in [*METHODS[path], *ATTRIBUTES[path].split()] if not re.search(rf"\b{name}\b", code)]
    assert not unused, f"{trainer.__name__} no longer uses {unused}: take them out of the tables of upstream.py."


@pytest.mark.slow
def test_names_are_those_that_the_package_imports():
    imported = {
        alias.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[-1] in ("names", "callbacks")
        for alias in node.names
    }
    unused = {name for names in NAMES.values() for name in names} - imported
    assert not unused, f"Nothing imports {unused}: take them out of the table in upstream/names.py."


@pytest.mark.parametrize("trainer, base", TRAINERS)
def test_tables_name_each_private_name_that_our_trainers_use(trainer, base):
    own = assigned(ours(trainer)) | {name for cls in ours(trainer) for name in vars(cls)}
    theirs = {*dir(base), *assigned(base.__mro__)}
    used = {  # code -> its name for the trainer
        **{inspect.getsource(cls): ("self", "super()") for cls in ours(trainer)},
        **{file.read_text(): ("trainer", "self.trainer") for file in files_of(trainer)},
    }
    private = {
        node.attr
        for code, names in used.items()
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in names and re.match("_[^_]", node.attr)
    }
    path = f"trl.{base.__name__}"
    unnamed = (private & theirs) - own - METHODS[path].keys() - {*ATTRIBUTES[path].split()}
    assert not unnamed, f"{trainer.__name__} uses {unnamed} of {path}: put them into the tables of upstream/names.py."


def test_a_built_trainer_has_the_attributes(tmp_path):
    """The other tests look for them in bytecode only."""
    for trainer in (grpo(tmp_path), make_trl_trainer(tmp_path)):
        path = next(f"trl.{cls.__name__}" for cls in type(trainer).__mro__ if f"trl.{cls.__name__}" in ATTRIBUTES)
        later = {"vllm_generation", "_last_loaded_step", "_tr_loss", "_total_loss_scalar", "_globalstep_last_logged"}
        later |= {"_environment_pool", "_async_tool_dicts", "_sync_tool_dicts"}  # only with environments and tools
        missing = [name for name in ATTRIBUTES[path].split() if name not in later and not hasattr(trainer, name)]
        require(not missing, f"{path} sets {missing} later, or no longer", f"A subclass of {path}")


def test_tested_versions_are_those_of_the_constraints():
    constraints = (PACKAGE.parent / "constraints.txt").read_text().splitlines()
    assert {f"{package}=={version}" for package, version in TESTED.items()} <= {*constraints}


# ---- A change is seen ----


def sentence_of(trainer):
    with pytest.raises(ImportError) as raised:
        check_now(trainer)
    return str(raised.value)


def test_unchanged_trl_passes_and_is_checked_once(monkeypatch):
    check_contract(PPOTrainer)
    monkeypatch.delattr(trl.GRPOTrainer, "_compute_loss")
    check_contract(PPOTrainer)
    assert "_compute_loss" in sentence_of(PPOTrainer)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda self, model: None, id="one parameter fewer"),
        pytest.param(lambda self, inputs, model: None, id="another order"),
        pytest.param(lambda self, model, inputs, scale=1.0: None, id="one more, which our override does not take"),
    ],
)
def test_changed_parameters_of_a_method(change, monkeypatch):
    monkeypatch.setattr(trl.GRPOTrainer, "_compute_loss", change)
    takes = ", ".join(list(inspect.signature(change).parameters)[1:])
    assert f"`GRPOTrainer._compute_loss` takes ({takes}), but trl_ext relies on (model, inputs)" in sentence_of(
        PPOTrainer
    )


def test_a_new_name_of_trl_that_we_use_already(monkeypatch):
    def prediction_step(self):
        self.kl_controller = None

    monkeypatch.setattr(trl.GRPOTrainer, "_some_hook", prediction_step, raising=False)
    monkeypatch.setattr(trl.GRPOTrainer, "_micro_steps_per_rollout", prediction_step, raising=False)
    message = sentence_of(PPOTrainer)
    assert "`GRPOTrainer` has _micro_steps_per_rollout, kl_controller, which PPOTrainer defines, too" in message


@pytest.mark.parametrize(
    "function, takes",
    [
        (lambda function: None, "(function)"),
        (lambda func, more: None, "(func, more)"),
    ],
)
def test_a_changed_function_is_reported_on_import(function, takes, monkeypatch):
    monkeypatch.setattr(utils, "get_callable_name", function)
    with pytest.raises(
        ImportError,
        match=rf"1\.16\.0\. In the installed trl .* `get_callable_name` takes {re.escape(takes)}, but trl_ext relies",
    ):
        from trl_ext.upstream.names import get_callable_name  # noqa: F401


# ---- The command ----


@pytest.mark.slow
def test_the_command_prints_each_item_and_its_status_says_whether_one_changed(monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main()
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0 and lines[0] == f"trl {trl.__version__}, tested with 1.16.0"
    assert "ok      trl.GRPOTrainer._compute_loss" in lines and lines[-1].startswith("All ")

    monkeypatch.delattr(trl.GRPOTrainer, "_compute_loss")
    with pytest.raises(SystemExit) as ended:
        command.main()
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 1 and " 1 changed since" in lines[-1]
    assert "CHANGED trl.GRPOTrainer._compute_loss: `GRPOTrainer` has no method `_compute_loss`" in lines


def test_temporarily_leaves_an_object_as_it_was():
    class Thing:
        limit = 1

        def read(self):
            return self.limit

    thing = Thing()
    thing.own = 2
    with pytest.raises(ZeroDivisionError), temporarily(thing, limit=3, read=lambda: 4, own=5, new=6):
        assert (thing.limit, thing.read(), thing.own, thing.new) == (3, 4, 5, 6)
        raise ZeroDivisionError
    assert vars(thing) == {"own": 2}  # and a later change of the class is seen
