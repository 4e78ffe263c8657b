"""Monitors by name, as in the recipes' `monitors:`."""

from pathlib import Path

import pytest
from transformers import EarlyStoppingCallback, TrainerState

from recipes import ppo
from tests.tiny import tiny_llama, tiny_tokenizer
from trl_ext.callbacks import CanaryCallback, KLBudgetCallback, attach_monitors, load_monitors
from trl_ext.callbacks.monitor import alerts_of
from trl_ext.runs.jsonl import read_jsonl


def test_names_and_arguments():
    plain, stopping, early, canary = load_monitors(
        [
            "KLBudgetCallback",
            "KLBudgetCallback(limit=8, action='stop', keys={'kl': 'my/kl'})",
            "EarlyStoppingCallback(early_stopping_patience=3)",
            "CanaryCallback(prompts=['the cat'])",
        ]
    )
    assert type(plain) is KLBudgetCallback and (stopping.limit, stopping.action) == (8, "stop")
    assert isinstance(early, EarlyStoppingCallback) and load_monitors(None) == []

    class Trainer:
        def __init__(self):
            self.callbacks, self.args = [], None
            self.add_callback, self.callback_handler = self.callbacks.append, self

    trainer = Trainer()
    attach_monitors(trainer, [plain, canary])
    assert trainer.callbacks == [plain, canary] and canary.trainer is trainer
    assert isinstance(canary, CanaryCallback)


def test_mistakes_are_answered(subtests):
    for entry, message in [
        ("KLBudgetCalback", "unknown monitor 'KLBudgetCalback'; did you mean KLBudgetCallback"),
        ("klbudget", "unknown monitor 'klbudget'; there are CanaryCallback, "),
        ("MonitorCallback", "unknown monitor 'MonitorCallback'; did you mean MonitoringPlotCallback"),
        ("KLBudgetCallback(limt=3)", "KLBudgetCallback has no argument 'limt'; did you mean limit"),
        ("KLBudgetCallback(limit=3, warn=5.0)", "`warn` must be above 0 and at most `limit`, got 5.0 and 3"),
        ("KLBudgetCallback(3)", r"write `Name` or `Name\(argument=value, …\)`"),
        ("KLBudgetCallback(limit=__import__('os'))", "values as in Python"),
        ("os.system", "cannot be read"),
        ("EarlyStoppingCallback(patience=3)", "unexpected keyword argument 'patience'"),
    ]:
        with subtests.test(entry=entry), pytest.raises(ValueError, match=message):
            load_monitors([entry])


@pytest.mark.slow
def test_shipped_recipe_trains_with_all_of_its_monitors(tmp_path, monkeypatch):
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
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
    blind = {alert["monitor"] for alert in alerts_of(state, "notice") if "nothing to watch" in alert["what"]}
    # The random model always scores 0, and constant returns have no variance to explain
    assert state.best_metric is not None and blind <= {"ValueHealthCallback"}


def test_recipe_answers_in_one_line_before_it_loads_a_model(capsys, tmp_path):
    for part in (tiny_llama(), tiny_tokenizer()):
        part.save_pretrained(tmp_path)
    given = ["--dataset_name", "x", "--reward_funcs", "os.path.join", "--use_cpu", "true"]
    given += ["--model_name_or_path", str(tmp_path)]
    with pytest.raises(SystemExit):
        ppo.main([*given, "--bf16", "false", "--monitors", "KLBudget"])
    assert "unknown monitor 'KLBudget'; did you mean KLBudgetCallback" in capsys.readouterr().err
