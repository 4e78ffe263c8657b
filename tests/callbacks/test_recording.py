"""Trainers that are used from Python leave metrics and a page, as the recipes do, and nothing of it changes a run."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import TrainerState

from tests.callbacks.replay import Replay
from tests.dpo.worker import config, pairs
from tests.tiny import length_reward, prompts, tiny_config, tiny_llama, tiny_reward_model, tiny_tokenizer
from trl_ext import DPOTrainer, PPOTrainer
from trl_ext.callbacks import JSONLCallback, KLBudgetCallback, record_run
from trl_ext.runs.jsonl import read_jsonl

RECORD = {"metrics.rank0.jsonl", "report.html"}


def ppo(folder, reward=length_reward, **kwargs):
    args = tiny_config(folder, **{"max_steps": 4, "record_run": True, **kwargs})
    given = {"train_dataset": prompts(), "processing_class": tiny_tokenizer()}
    return PPOTrainer(model=tiny_llama(), reward_funcs=reward, args=args, **given)


def dpo(folder, **kwargs):
    args = config(folder, **{"max_steps": 2, "record_run": True, **kwargs})
    return DPOTrainer(model=tiny_llama(), args=args, train_dataset=pairs(), processing_class=tiny_tokenizer())


def left_in(folder):
    return {path.name for path in folder.iterdir() if path.suffix in (".jsonl", ".html")}


@pytest.mark.slow
@pytest.mark.parametrize(("make", "samples"), [(ppo, {"completions.rank0.jsonl"}), (dpo, set())])
def test_a_trainer_records_its_run_unless_it_is_told_not_to(make, samples, tmp_path):
    weights = []
    for is_recorded in (True, False):
        torch.manual_seed(0)
        trainer = make(tmp_path / str(is_recorded), record_run=is_recorded)
        trainer.train()
        weights.append(torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()]))
    assert left_in(tmp_path / "True") == RECORD | samples
    assert not (tmp_path / "False").exists() or not left_in(tmp_path / "False")
    assert torch.equal(*weights)


@pytest.mark.slow
def test_what_a_script_adds_is_not_recorded_twice(tmp_path):
    trainer = ppo(tmp_path)
    trainer.add_callback(JSONLCallback())  # after the trainer was made
    record_run(trainer)
    trainer.train()
    kinds = [event["type"] for event in read_jsonl(tmp_path / "metrics.rank0.jsonl")]
    assert kinds.count("begin") == 1 and kinds.count("train") == 4
    assert left_in(tmp_path) == RECORD | {"completions.rank0.jsonl"}


def test_a_page_that_cannot_be_written_is_one_sentence_and_ends_nothing(tmp_path, monkeypatch):
    def full(folder):
        raise OSError(28, "No space left on device")

    said = []
    monkeypatch.setattr("trl_ext.workbench.pages.report.write_report", full)
    monkeypatch.setattr("trl_ext.callbacks.recording.logger.warning", said.append)
    trainer = dpo(tmp_path)
    trainer.train()
    assert trainer.state.global_step == 2
    assert said == ["No page of this run was written: [Errno 28] No space left on device"]


def test_a_trainer_runs_where_the_pages_are_not_installed(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("trl_ext.callbacks.recording.logger.warning", said.append)
    for name in [name for name in sys.modules if name.startswith("trl_ext.workbench")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "trl_ext.workbench", None)
    trainer = ppo(tmp_path)
    trainer.train()
    assert trainer.state.global_step == 4 and left_in(tmp_path) == {"metrics.rank0.jsonl", "completions.rank0.jsonl"}
    assert said == ["No page of this run was written: this package has no workbench"]


def test_only_the_main_process_writes(tmp_path):
    other = TrainerState(is_world_process_zero=False)
    for state in (other, TrainerState()):
        trainer = dpo(tmp_path / str(state.is_world_process_zero))
        record_run(trainer)
        run = Replay(trainer.args, *trainer.callback_handler.callbacks[1:], state=state)
        run.log(1, loss=0.5)
        run.fire("on_train_end")
    assert not left_in(tmp_path / "False") and left_in(tmp_path / "True") == RECORD


@pytest.mark.slow
def test_what_the_report_on_the_reward_model_says_against_it_is_on_the_page(tmp_path):
    model = tiny_reward_model(tiny_llama())
    for part in (model, tiny_tokenizer()):
        part.save_pretrained(tmp_path / "reward")
    verdict = {"passed": False, "reasons": ["the accuracy <b>is a coin's", "it likes `empty` answers"]}
    (tmp_path / "reward" / "reward_report.json").write_text(json.dumps({"verdict": verdict}))
    trainer = ppo(tmp_path / "run", str(tmp_path / "reward"))
    trainer.add_callback(KLBudgetCallback(warn=1e3, limit=1e3))
    trainer.train()
    page = (tmp_path / "run" / "report.html").read_text()
    told = page.index('<p class="act">Not passed: '), page.index("it likes <code>empty</code> answers")
    assert page.index('<p class="verdict">') < told[0] < told[1] < page.index('<div class="tiles">')
    said = page[page.index('<p class="verdict">') :].partition("</p>")[0]
    assert "; a reward model did not pass its report; HackWatch and KLBudgetCallback watched and" in said
    assert "the accuracy &lt;b&gt;is a coin&#39;s" in page


@pytest.mark.slow
def test_a_script_with_our_trainers_is_as_quiet_as_a_recipe():
    """Some remarks come as libraries are imported, so that a trainer's constructor would be too late."""
    code = """
import logging
from trl_ext import PPOConfig
from trl_ext.upstream import terminal
assert terminal.is_quiet() and all(logging.getLogger(name).filters for name in terminal.REMARKS)
import peft
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0 and ran.stderr == "", ran.stderr
