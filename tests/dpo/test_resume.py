"""A run that goes on from a checkpoint ends as if it had never stopped: β, its controller and the margins included."""

import json

import pytest
import torch
from torch.testing import assert_close

from tests.dpo.worker import BETA_DPO, DRIFT, INFORMED, NORMALIZED, make_trainer, resumed
from trl_ext.dpo.trainer import STATE_FILE


@pytest.mark.parametrize(
    "options",
    [
        {**DRIFT, **NORMALIZED, "gradient_accumulation_steps": 2},
        {**BETA_DPO, **INFORMED, **NORMALIZED},
        {**DRIFT, "precompute_ref_log_probs": True},
        {**DRIFT, "ignore_data_skip": True, "save_steps": 2, "max_steps": 3},  # resumes at 2 below
    ],
    ids=lambda options: " ".join(options),
)
def test_resuming_is_exact(options, tmp_path):
    if "ignore_data_skip" in options:  # other data, so only the state can be compared
        make_trainer(tmp_path, save_strategy="steps", **options).train()
        again = make_trainer(tmp_path, **options)
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        saved = torch.load(tmp_path / "checkpoint-2" / STATE_FILE, weights_only=True)["beta_controller"]
        assert again.beta_controller.beta == pytest.approx(saved["beta"], rel=0.1) and saved["beta"] != 0.1
        return
    whole, again = resumed(tmp_path, **options)
    assert_close(again, whole, rtol=0, atol=0)
    assert whole["beta"] != 0.1


def test_without_a_controller_nothing_is_written(tmp_path):
    make_trainer(tmp_path, save_strategy="steps", save_steps=3, log_displacement=True).train()
    assert not (tmp_path / "checkpoint-3" / STATE_FILE).exists()
    assert json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())["global_step"] == 3


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({}, DRIFT, "dpo_state.pt is missing: the checkpoint was written without `beta_controller`"),
        (DRIFT, BETA_DPO, "written with `beta_controller='drift'`, this run has 'beta_dpo'"),
        (DRIFT, {**DRIFT, **NORMALIZED}, "written with another `margin_normalization` than 'source'"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(before, after, message, tmp_path):
    make_trainer(tmp_path, save_strategy="steps", save_steps=3, max_steps=3, **before).train()
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, **after).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_other_sources_are_refused(tmp_path):
    make_trainer(tmp_path, save_strategy="steps", save_steps=3, max_steps=3, **NORMALIZED).train()
    trainer = make_trainer(tmp_path, **NORMALIZED)
    trainer.margin_normalizer.sources = ["other"]
    with pytest.raises(ValueError, match=r"knows the sources \['long', 'short'\], the datasets have \['other'\]"):
        trainer.train(resume_from_checkpoint=True)
