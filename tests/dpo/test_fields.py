"""Each field that `DPOConfig` adds changes the trained weights, or is in a table of what it does instead."""

import dataclasses
import functools

import pytest
import torch
import trl

from tests.dpo.worker import make_trainer, weights
from tests.tiny import assert_each_changes
from trl_ext import DPOConfig

pytestmark = pytest.mark.slow

STEERED = {"beta_controller": "drift", "drift_target": 1e-3, "drift_horizon": 20.0}
INFORMED = {"use_margin": True}
SOURCES = {"margin_normalization": "source"}
CHANGED = {  # field -> another value, and the settings that it needs
    "beta_max": (0.1, STEERED),
    "beta_min": (0.1, {**STEERED, "drift_target": 1e3}),
    "dpop_lambda": (1.0, {}),
    "drift_horizon": (99.0, STEERED),
    "drift_target": (1e3, STEERED),
    "margin_normalization": ("source", {}),  # after 64 pairs of each
    "margin_scale": (0.5, INFORMED),
    "margin_warmup_pairs": (4, SOURCES),
    "use_confidence": (True, {}),
    "use_margin": (True, {}),
    "use_weight": (True, {}),
}
WITHOUT_WEIGHTS = {  # field -> what it does instead
    "log_displacement": "logs `logps/…`",
    "on_save_failure": "whether the run ends",
    "record_run": "what is written beside the model",
    "record_answers": "what is written beside the model",
    "resume_anyway": "a permission",
    "save_in_background": "time",
    "staging_dir": "where a checkpoint is written first",
}


def trained(tmp_path, **config):
    torch.manual_seed(0)
    trainer = make_trainer(tmp_path, learning_rate=1e-2, max_steps=20, per_device_train_batch_size=8, **config)
    trainer.train()
    return torch.cat([p.flatten() for p in weights(trainer).values()])


def test_each_field_is_in_one_table():
    ours = {f.name for f in dataclasses.fields(DPOConfig)} - {f.name for f in dataclasses.fields(trl.DPOConfig)}
    assert ours == CHANGED.keys() | WITHOUT_WEIGHTS.keys() | {"beta_controller"}


def test_a_field_changes_the_trained_weights(subtests, tmp_path):
    assert_each_changes(CHANGED, functools.partial(trained, tmp_path), subtests)
    assert not torch.equal(trained(tmp_path, **STEERED), trained(tmp_path))  # `beta_controller`
