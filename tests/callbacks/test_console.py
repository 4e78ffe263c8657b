"""What a run shows on the terminal: each trainer's rows, in a terminal and in a file, and nothing twice."""

import os
import re
import subprocess
import sys

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


def test_a_narrow_terminal_has_what_matters_and_the_header_comes_again(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    run.log(16, logs=PPO)
    monkeypatch.setenv("COLUMNS", "40")
    for step in range(32, 62):
        run.log(step, logs=PPO)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == "step score KL/compl loss entropy length clip".split()
    assert lines[2].split() == lines[23].split() == ["step", "score", "KL/compl"]
    assert max(map(len, lines[:2])) < 80 and max(map(len, lines[2:])) < 40


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
    assert "{'loss'" not in out and out.count("\nPPO\n") + out.startswith("PPO\n") == 1
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


# ---- A file ----

SCRIPT = """
import sys, torch
from trl_ext.upstream.terminal import quiet
quiet()
torch.set_num_threads(1)
from tests.callbacks.test_console import Always, ppo, prompts
ppo(sys.argv[1], Always(), max_steps=8, learning_rate=1e-2, disable_tqdm=False, logging_steps=2,
    eval_dataset=prompts(4), eval_strategy="steps", eval_steps=4).train()
"""
ENVIRONMENT = {"COLUMNS": "100", "TERM": "xterm", "HF_HUB_OFFLINE": "1"}


@pytest.mark.slow
def test_in_a_file_plain_rows(tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | ENVIRONMENT)
    assert run.returncode == 0, run.stderr
    assert "\x1b" not in run.stdout + run.stderr and "\r" not in run.stdout + run.stderr and "%|" not in run.stderr
    assert len(re.findall(r"^train ", run.stdout, re.MULTILINE)) == 4
    assert len(re.findall(r"^alert ", run.stderr, re.MULTILINE)) == 1
