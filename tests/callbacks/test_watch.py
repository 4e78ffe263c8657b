"""The watch of every PPO run: attached once, it changes no weight, acts, holds over a restart, and is on the page."""

import pytest
import torch

from tests.callbacks.replay import ppo
from trl_ext.callbacks import HackWatch
from trl_ext.runs import checkpoint_to_resume, read_jsonl
from trl_ext.runs.control import Stopped
from trl_ext.workbench.pages.page import page
from trl_ext.workbench.pages.recorded import read_run

pytestmark = pytest.mark.slow


@pytest.fixture
def alarm(monkeypatch):
    """From the third log on the answers are as in a hack."""
    reasons = {"phrase": "60% of answers contain one phrase", "kl": "KL 9 nats", "length": "answers of 9 tokens"}
    monkeypatch.setattr(HackWatch, "_witnesses", lambda self, logs: reasons)
    monkeypatch.setattr(HackWatch, "_risen", lambda self: 1.5 if self.step > 2 else None)


def train(folder, *callbacks, **config):
    saving = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "record_run": True}
    trainer = ppo(folder, *callbacks, **saving, num_mini_batches=1, num_ppo_epochs=1, **config)
    trainer.train(resume_from_checkpoint=checkpoint_to_resume(trainer.args))
    return trainer


def watches(trainer):
    return [each for each in trainer.callback_handler.callbacks if isinstance(each, HackWatch)]


def risks(folder):
    logs = [event["logs"] for event in read_jsonl(folder / "metrics.rank0.jsonl") if event["type"] == "train"]
    return [log.get("watch/risk") for log in logs]


def said(folder):
    return page(read_run(folder)).split('class="verdict">')[1].split("</p>")[0]


def test_it_watches_by_default_and_changes_no_weight(tmp_path, alarm):
    watched, off = train(tmp_path / "on"), train(tmp_path / "off", watch=False)  # as YAML reads `off`
    assert [each.action for each in watches(watched)] == ["warn"] and not watches(off) and off.args.watch == "off"
    for one, other in zip(watched.model.parameters(), off.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert risks(tmp_path / "on") == [0.0, 0.0] + [pytest.approx(1 - 0.3 * 0.6 * 0.6)] * 4
    assert risks(tmp_path / "off") == [None] * 6
    (alert,) = read_jsonl(tmp_path / "on/alerts.jsonl")  # once
    assert (
        alert["step"] == 3
        and "60% of answers contain one phrase; KL 9 nats; answers of 9 tokens; score +1.5 σ" in alert["advice"]
    )
    assert said(tmp_path / "on").endswith("; HackWatch warned at step 3.")
    assert said(tmp_path / "off").endswith("; no monitors were set.")


def test_a_stop_holds_over_a_restart_until_somebody_says_to_go_on(tmp_path, alarm):
    assert train(tmp_path, watch="stop").state.global_step == 3
    with pytest.raises(Stopped, match="HackWatch ended this run at step 3 .*resume_anyway"):
        train(tmp_path, watch="stop")
    assert train(tmp_path, watch="warn", resume_anyway=True).state.global_step == 6


def test_it_raises_the_kl_coefficient(tmp_path, alarm):
    trainer = train(tmp_path, watch="raise_kl", kl_coef=0.1)
    assert trainer.kl_controller.kl_coef == pytest.approx(0.2)
