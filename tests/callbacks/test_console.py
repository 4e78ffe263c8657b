"""What a run shows on the terminal: each trainer's rows, and nothing twice."""

import pytest
from transformers import PrinterCallback, ProgressCallback

from tests.callbacks.replay import Replay, ppo, sft
from tests.tiny import prompts, tiny_config
from trl_ext.callbacks import ConsoleCallback, Finding, MonitorCallback

PPO = {  # a log of PPOTrainer, shortened
    "loss": -0.05519,
    "learning_rate": 0.003,
    "grad_norm": 0.5431,
    "completions/mean_length": 9.016,
    "objective/kl": 0.04433,
    "objective/scores": -0.1109,
    "policy/clipfrac_avg": 0.1696,
    "policy/entropy_avg": 3.115,
    "episode": 128.0,
    "epoch": 0.25,
}


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
        elif words and words[0] in ("train", "eval", "greedy") and heads:
            found.append(dict(zip(heads, words, strict=True)))
    return found


# ---- Rows ----


@pytest.fixture
def run(tmp_path):
    return Replay(tiny_config(tmp_path), ConsoleCallback())


def test_ppo_row_and_its_header(run, capsys, wide):
    run.log(16, logs=PPO)
    header, row = (line.split() for line in capsys.readouterr().out.splitlines())
    assert header == "step score KL/compl loss entropy length clip episodes lr grad epoch".split()
    assert row == "train 16 -0.111 0.0443 -0.0552 3.12 9.02 0.17 128 0.003 0.543 0.25".split()


# ---- Trainers ----


class Always(MonitorCallback):
    """Alerts at the first log."""

    def watch(self, logs):
        yield Finding("it speaks", "Look at it.", 1.0, 0.5, acts=False)


def consoles(trainer):
    return [type(c) for c in trainer.callback_handler.callbacks if isinstance(c, (ProgressCallback, PrinterCallback))]


def test_ppo(tmp_path, capsys, caplog, wide):
    class Mine(ProgressCallback):
        pass

    trainer = ppo(tmp_path, Mine(), Always(), eval_dataset=prompts(4), eval_strategy="steps", eval_steps=4)
    assert consoles(trainer) == [ConsoleCallback, Mine]  # a user's own stays
    trainer.remove_callback(Mine)
    trainer.train()
    out = capsys.readouterr().out
    assert "{'loss'" not in out and "\x1b" not in out and out.count("\nPPO\n") + out.startswith("PPO\n") == 1
    found = rows(out)
    kinds = [("train", str(step)) for step in range(1, 5)] + [("eval", "4"), ("greedy", "4")]
    assert [(row["row"], row["step"]) for row in found] == kinds
    assert float(found[0]["score"]) > 0 and float(found[0]["s/step"]) > 0 and found[0]["episodes"] == "8"
    assert found[0]["entropy"] != "-" and found[1]["score"] == "-"  # no rollout begins at step 2
    assert float(found[-1]["length"]) > 0
    # An alert goes to a script's own logging, and is not shown a second time
    assert sum("it speaks" in record.message for record in caplog.records) == 1 and "it speaks" not in out


def test_rows_of_a_stock_trainer(tmp_path, capsys, wide):
    trainer = sft(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1)
    for _ in range(2):  # the second time there is nothing to replace, as in a notebook
        ConsoleCallback.replace(trainer)
    assert consoles(trainer) == [ConsoleCallback]
    trainer.train()
    out = capsys.readouterr().out
    assert "'loss'" not in out and "train_runtime" not in out
    assert [row["row"] for row in rows(out)] == ["train", "eval"] * 2 and {"accuracy", "entropy"} <= rows(out)[
        0
    ].keys()
