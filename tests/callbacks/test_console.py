"""The rows of each trainer on the terminal, each once."""

import pytest
from transformers import PrinterCallback, ProgressCallback

from tests.callbacks.replay import ppo, sft
from tests.tiny import prompts
from trl_ext.callbacks import ConsoleCallback, Finding, MonitorCallback


@pytest.fixture
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")


def rows(text):
    """The printed rows as dicts, by the header above each."""
    found, heads = [], []
    for line in text.splitlines():
        words = line.split()
        if words and words[0] == "step":
            heads = ["row", *words]
        elif words and words[0] in ("train", "eval") and heads:
            found.append(dict(zip(heads, words, strict=True)))
    return found


# ---- Trainers ----


class Always(MonitorCallback):
    """Alerts at the first log."""

    def watch(self, logs):
        yield Finding("it fires", "Look at it.", 1.0, 0.5, acts=False)


def consoles(trainer):
    return [type(c) for c in trainer.callback_handler.callbacks if isinstance(c, (ProgressCallback, PrinterCallback))]


def test_ppo(tmp_path, capsys, caplog, wide):
    class Mine(ProgressCallback):
        pass

    trainer = ppo(tmp_path, Mine(), Always(), eval_dataset=prompts(4), eval_strategy="steps", eval_steps=4)
    assert consoles(trainer) == [ConsoleCallback, Mine]  # a user's own callback stays
    trainer.remove_callback(Mine)
    trainer.train()
    out = capsys.readouterr().out
    assert "{'loss'" not in out and "\x1b" not in out and out.count("PPO: ") == 1
    found = rows(out)
    kinds = [("train", str(step)) for step in range(1, 5)] + [("eval", "4")]
    assert [(row["row"], row["step"]) for row in found] == kinds
    assert float(found[0]["score"]) > 0 and float(found[0]["s/step"]) > 0 and found[0]["episodes"] == "8"
    assert found[0]["entropy"] != "-" and found[1]["score"] == "-"  # no rollout begins at step 2
    assert float(found[-1]["length"]) > 0
    # An alert goes to the script's own logging, and is not shown twice
    assert sum("it fires" in record.message for record in caplog.records) == 1 and "it fires" not in out


def test_rows_of_a_stock_trainer(tmp_path, capsys, wide):
    trainer = sft(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1)
    for _ in range(2):  # the second time, as in a notebook, there is nothing to replace
        ConsoleCallback.replace(trainer)
    assert consoles(trainer) == [ConsoleCallback]
    trainer.train()
    out = capsys.readouterr().out
    assert "'loss'" not in out and "train_runtime" not in out
    assert [row["row"] for row in rows(out)] == ["train", "eval"] * 2 and {"accuracy", "entropy"} <= rows(out)[
        0
    ].keys()
