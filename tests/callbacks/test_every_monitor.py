"""Each monitor has test cases, an example that runs and a name in YAML, and refuses useless settings."""

import doctest
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import EarlyStoppingCallback, TrainerState

import trl_ext.callbacks as callbacks
from recipes import ppo
from tests.callbacks.cases import BAD_NUMBERS, CHANGES, NULL
from tests.callbacks.replay import RUNBOOK, notices_of
from tests.tiny import letters_reward, prompts, tiny_llama, tiny_ppo, tiny_tokenizer
from trl_ext.callbacks import (
    CanaryCallback,
    HackWatch,
    KLBudgetCallback,
    MonitorCallback,
    attach_monitors,
    load_monitors,
)
from trl_ext.cli.parser import entry_of
from trl_ext.runs.files import read_jsonl

CALLBACKS = [name for name in callbacks.__all__ if name.endswith("Callback") or name == "HackWatch"]
MONITORS = [cls for name in CALLBACKS if issubclass(cls := getattr(callbacks, name), MonitorCallback) and cls.runbook]


@pytest.mark.parametrize("monitor", MONITORS)
def test_each_monitor_has_cases_and_a_section(monitor):
    """Without cases a monitor would not be tested on noise, on a change, and in a real trainer."""
    of_null = {name for name, case in NULL.items() if case[0] is monitor}
    if monitor is not HackWatch:  # it reads completions: test_watch.py
        assert of_null and of_null & CHANGES.keys() and monitor in BAD_NUMBERS
    assert f"\n## {monitor.runbook}\n\nWhat `{monitor.__name__}` says.\n" in RUNBOOK


@pytest.mark.parametrize("wrong", [{"action": "shout"}, {"sinks": ["pager"]}])
def test_settings_that_would_do_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match="warn, save, stop|log, jsonl, wandb"):
        KLBudgetCallback(**wrong)


@pytest.mark.slow
def test_docstring_examples_run(tmp_path, monkeypatch):
    """All on one trainer, which then trains a step."""
    monkeypatch.chdir(tmp_path)
    trainer = tiny_ppo(tmp_path, max_steps=1, eval_dataset=prompts(8, seed=1))
    for name in CALLBACKS:
        names = {exported: getattr(callbacks, exported) for exported in callbacks.__all__} | {"trainer": trainer}
        docstring = inspect.getdoc(getattr(callbacks, name))
        example = doctest.DocTestParser().get_doctest(docstring, names, name, None, None)
        assert example.examples, f"the docstring of {name} needs an example that begins with >>>"
        assert doctest.DocTestRunner().run(example).failed == 0
    watches = [each for each in trainer.callback_handler.callbacks if isinstance(each, HackWatch)]
    for other in watches[1:]:  # a second callback of one class is refused
        trainer.remove_callback(other)
    trainer.train()
    assert trainer.state.global_step == 1


# ---- By name ----


def test_names_and_arguments():
    entries = [
        "KLBudgetCallback",
        "{KLBudgetCallback: {limit: 8, action: stop, keys: {kl: my/kl}}}",
        "{EarlyStoppingCallback: {early_stopping_patience: 3}}",
        "{CanaryCallback: {prompts: [the cat], judge: tests.tiny.letters_reward}}",
    ]
    plain, stopping, early, canary = load_monitors(entry_of(entries))
    assert type(plain) is KLBudgetCallback and (stopping.limit, stopping.action) == (8, "stop")
    assert isinstance(early, EarlyStoppingCallback) and load_monitors(None) == []
    added = []
    trainer = SimpleNamespace(add_callback=added.append, callback_handler=SimpleNamespace(callbacks=added), args=None)
    attach_monitors(trainer, [plain, canary])
    assert added == [plain, canary] and isinstance(canary, CanaryCallback) and canary.trainer is trainer
    assert canary.judge is letters_reward


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("[HackWatch, KLBudget]", "entry 2: unknown monitor 'KLBudget'; did you mean KLBudgetCallback[?]"),
        ("[as_label]", "unknown monitor 'as_label'; there are .*HackWatch, "),
        ("[{KLBudgetCallback: {limt: 3}}]", "entry 1: .*unexpected keyword argument 'limt'"),
        ("[{KLBudgetCallback: 3}]", "entry 1: .*must be `argument: value`, got 3"),
        ("[{KLBudgetCallback: , limit: 3}]", "a monitor must be a `Name`, or one `Name: {argument: value}`, got"),
        ("{KLBudgetCallback: {limit: 3}}", "`monitors` must be a list"),
    ],
)
def test_a_wrong_name_or_argument_is_refused(entries, message):
    with pytest.raises(ValueError, match=message):
        load_monitors(entry_of(entries))


@pytest.mark.slow
def test_the_shipped_recipe_trains_with_all_its_monitors(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    tiny_llama(max_position_embeddings=256).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    arguments = ["--config", "recipes/tinystories/ppo_monitored.yaml", "--model_name_or_path", str(tmp_path / "model")]
    shorter = {"total_episodes": 16, "per_device_train_batch_size": 2, "local_rollout_forward_batch_size": 8}
    shorter |= {"max_completion_length": 4, "eval_steps": 6, "save_steps": 6, "logging_steps": 2, "eval_size": 4}
    shorter |= {"output_dir": tmp_path / "run", "use_cpu": True}
    ppo.main([*arguments, *(str(part) for name, value in shorter.items() for part in (f"--{name}", value))])
    events = list(read_jsonl(tmp_path / "run" / "metrics.rank0.jsonl"))
    evaluations = [event["logs"] for event in events if event["type"] == "eval"]
    assert len(evaluations) >= 3 and all("eval_rewards/gold_judge/mean" in logs for logs in evaluations)
    assert "eval_gold/win_rate" in evaluations[1] and (tmp_path / "run" / "rlhf_monitoring.png").exists()
    newest = max((tmp_path / "run").glob("checkpoint-*/trainer_state.json"), key=lambda path: path.stat().st_mtime)
    state = TrainerState.load_from_json(str(newest))
    blind = {alert["monitor"] for alert in notices_of(state) if "nothing to watch" in alert["what"]}
    # The random model always scores 0, and constant returns have no variance to explain
    assert state.best_metric is not None and blind <= {"ValueHealthCallback"}
