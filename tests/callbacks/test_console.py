"""What a run shows on the terminal: each trainer's rows, in a terminal and in a file, and nothing twice."""

import os
import pty
import re
import subprocess
import sys
import termios

import pytest
from datasets import Dataset
from transformers import PrinterCallback, ProgressCallback
from trl import GRPOConfig, GRPOTrainer

from tests.callbacks.replay import SIZES, Replay, ppo, sft
from tests.tiny import ON_CPU, length_reward, prompts, tiny_config, tiny_llama, tiny_tokenizer
from trl_ext import DPOConfig, DPOTrainer
from trl_ext.callbacks import ConsoleCallback, Finding, MonitorCallback

PAIRS = {"prompt": ["the cat"] * 8, "chosen": [" sat on the mat"] * 8, "rejected": [" flew over"] * 8}
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
    assert capsys.readouterr().out.splitlines() == [
        "         step episodes   score KL/resp entropy  length    clip    loss      lr    grad   epoch",
        "train      16      128  -0.111  0.0443    3.12    9.02   0.170 -0.0552 3.0e-03   0.543   0.250",
    ]


def test_a_narrow_terminal_has_what_matters_and_the_header_comes_again(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    run.log(16, logs=PPO)
    monkeypatch.setenv("COLUMNS", "40")
    for step in range(32, 62):
        run.log(step, logs=PPO)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["step", "episodes", "score", "KL/resp", "entropy", "length", "clip", "loss", "lr"]
    assert lines[2].split() == lines[23].split() == ["step", "score", "KL/resp", "loss"]
    assert max(map(len, lines[:2])) < 80 and max(map(len, lines[2:])) < 40


# ---- Trainers ----


class Always(MonitorCallback):
    """Alerts at the first log."""

    def watch(self, logs):
        yield Finding("it speaks", "Look at it.", 1.0, 0.5, acts=False)


def consoles(trainer):
    return [type(c) for c in trainer.callback_handler.callbacks if isinstance(c, (ProgressCallback, PrinterCallback))]


def test_ppo(tmp_path, capsys, wide):
    class Mine(ProgressCallback):
        pass

    trainer = ppo(tmp_path, Mine(), eval_dataset=prompts(4), eval_strategy="steps", eval_steps=4)
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


def stock_sft(folder, evaluated):
    trainer = sft(folder, max_steps=2, eval_strategy="steps", eval_steps=1)
    trainer.eval_dataset = evaluated(trainer.eval_dataset)
    return trainer


def stock_grpo(folder):
    tiny_llama().save_pretrained(folder / "model")  # with `beta` TRL loads the reference by its path
    sizes = {"max_steps": 2, "num_generations": 2, "max_completion_length": 4, "beta": 0.1}
    args = GRPOConfig(str(folder), **SIZES | sizes)
    return GRPOTrainer(str(folder / "model"), length_reward, args, prompts(8), processing_class=tiny_tokenizer())


def dpo(folder):
    args = DPOConfig(str(folder), **ON_CPU, max_steps=2)
    return DPOTrainer(
        tiny_llama(), args=args, train_dataset=Dataset.from_dict(PAIRS), processing_class=tiny_tokenizer()
    )


@pytest.mark.parametrize(
    ("make", "kinds", "heads"),
    [
        (lambda folder: stock_sft(folder, lambda texts: texts), ["train", "eval"] * 2, {"accuracy", "entropy"}),
        # An evaluation on a stream has no bar
        (lambda folder: stock_sft(folder, Dataset.to_iterable_dataset), ["train", "eval"] * 2, {"accuracy"}),
        (stock_grpo, ["train"] * 2, {"score", "KL/tok", "entropy", "length", "clip"}),
        pytest.param(dpo, ["train"] * 2, {"accuracy", "margin"}, marks=pytest.mark.slow),
    ],
    ids=["SFT", "stream", "GRPO", "DPO"],
)
def test_rows_of_other_trainers(make, kinds, heads, tmp_path, capsys, wide):
    trainer = make(tmp_path)
    for _ in range(2):  # the second time there is nothing to replace, as in a notebook
        ConsoleCallback.replace(trainer)
    assert consoles(trainer) == [ConsoleCallback]
    trainer.train()
    out = capsys.readouterr().out
    assert "'loss'" not in out and "train_runtime" not in out
    assert [row["row"] for row in rows(out)] == kinds and all(heads <= row.keys() for row in rows(out)[:1])


# ---- A terminal ----

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


def in_terminal(folder):
    """What a terminal of 100 columns is sent by a run."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 100))
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=os.environ | ENVIRONMENT) as run:
        os.close(theirs)
        sent = b""
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
            sent += part
        assert run.wait(60) == 0, sent.decode()
    os.close(ours)
    return sent.decode()


def screen(sent):
    """What is left on the screen, of text that goes to the start of a line or a line up, and writes over it."""
    lines, row, at = [""], 0, 0
    for part in re.split(r"(\r|\n|\x1b\[A|\x1b\[[0-9;]*m)", sent):
        if part == "\r":
            at = 0
        elif part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part == "\x1b[A":
            row -= 1
        elif not part.startswith("\x1b"):
            lines[row] = lines[row][:at].ljust(at) + part + lines[row][at + len(part) :]
            at += len(part)
    return [line.rstrip() for line in lines]


@pytest.mark.slow
def test_in_a_terminal_a_bar_and_alerts_that_do_not_tear_it(tmp_path):
    sent = in_terminal(tmp_path)
    assert re.search(r"train  50%\|.*\| 4/8 \[\d\d:\d\d, ETA \d\d:\d\d, score [\d.]+, KL/resp ", sent)
    lines = screen(sent)
    assert sum("train 100%" in line for line in lines) == 1 and "8/8" in "".join(lines)
    begins = [line.split()[0] for line in lines if line]
    assert begins.count("alert") == 1
    assert begins.count("eval") == begins.count("greedy") == 2
    assert all("%|" not in line or line.startswith("train 100%") for line in lines)


@pytest.mark.slow
def test_in_a_file_plain_rows(tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | ENVIRONMENT)
    assert run.returncode == 0, run.stderr
    assert "\x1b" not in run.stdout + run.stderr and "\r" not in run.stdout + run.stderr and "%|" not in run.stderr
    assert len(re.findall(r"^train ", run.stdout, re.MULTILINE)) == 4
    assert len(re.findall(r"^alert ", run.stderr, re.MULTILINE)) == 1
