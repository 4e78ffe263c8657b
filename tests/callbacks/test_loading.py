"""`monitors:` of the recipes."""

import pytest
from transformers import EarlyStoppingCallback

from recipes import ppo
from trl_ext.callbacks import CanaryCallback, KLBudgetCallback, attach_monitors, load_monitors


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
            self.callbacks = []
            self.add_callback = self.callbacks.append

    trainer = Trainer()
    attach_monitors(trainer, [plain, canary])
    assert trainer.callbacks == [plain, canary] and canary.trainer is trainer
    assert isinstance(canary, CanaryCallback)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("KLBudgetCalback", "unknown monitor 'KLBudgetCalback'; did you mean KLBudgetCallback"),
        ("klbudget", "unknown monitor 'klbudget'; there are CanaryCallback, "),
        ("MonitorCallback", "unknown monitor 'MonitorCallback'; did you mean MonitoringPlotCallback"),
        ("KLBudgetCallback(limt=3)", "KLBudgetCallback has no argument 'limt'; did you mean limit"),
        ("KLBudgetCallback(limit=3)", "`warn` must be above 0 and at most `limit`, got 5.0 and 3"),
        ("KLBudgetCallback(3)", r"write `Name` or `Name\(argument=value, …\)`"),
        ("KLBudgetCallback(limit=__import__('os'))", "values as in Python"),
        ("os.system", "cannot be read"),
        ("EarlyStoppingCallback(patience=3)", "unexpected keyword argument 'patience'"),
    ],
)
def test_mistakes_are_answered(entry, message):
    with pytest.raises(ValueError, match=message):
        load_monitors([entry])


def test_recipe_answers_in_one_line_before_it_loads_a_model(capsys):
    given = ["--dataset_name", "x", "--reward_funcs", "os.path.join", "--model_name_or_path", "y", "--use_cpu", "true"]
    with pytest.raises(SystemExit):
        ppo.main([*given, "--bf16", "false", "--monitors", "KLBudget"])
    assert "unknown monitor 'KLBudget'; did you mean KLBudgetCallback" in capsys.readouterr().err
