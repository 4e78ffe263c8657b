"""Settings and rows that would train wrongly in silence are refused; TRL's own checks are not repeated."""

import dataclasses
import math

import pytest
import torch
import trl
from datasets import Dataset

from tests.dpo.worker import DRIFT, INFORMED, broken_weight, config, make_trainer, pairs
from tests.tiny import tiny_llama
from trl_ext import DPOConfig


def test_every_field_of_trl_keeps_its_default(tmp_path):
    ours, theirs = (cls(str(tmp_path), use_cpu=True) for cls in (DPOConfig, trl.DPOConfig))
    for field in dataclasses.fields(theirs):
        if field.name not in ("bf16", "logging_dir", "distributed_state", "mixed_precision"):
            assert getattr(ours, field.name) == getattr(theirs, field.name), field.name
    assert not ours.reads_log_probs and not ours.replaces_sigmoid


def test_settings_that_would_train_wrongly_are_refused(subtests, tmp_path):
    informed = ({"use_margin": True}, {"use_confidence": True}, {"use_weight": True}, {"dpop_lambda": 1.0})
    for given, message in [
        ({"beta": 0.0}, "`beta` must be > 0"),
        ({"beta_controller": "drift"}, "needs `drift_target`"),
        ({"beta_max": 1.0}, "needs `beta_controller='drift'`"),
        ({"beta_controller": "drift", "drift_target": 1.0, "beta_max": 1e-4}, "above `beta_max=0.0001`"),
        ({"label_smoothing": 0.1}, "`label_smoothing` has no effect"),
        ({"loss_type": ["ipo", "sft"], "margin_normalization": "source"}, "only on β times the margin"),
        ({"use_weight": True, "use_weighting": True}, "`use_weighting=False`"),
        *(({**each, "loss_type": "hinge"}, "need `loss_type` 'sigmoid'") for each in informed),
        *(({**each, "f_divergence_type": "js_divergence"}, "need `loss_type` 'sigmoid'") for each in informed),
    ]:
        with subtests.test(given=given), pytest.raises(ValueError, match=message):
            config(tmp_path, **given)
    config(tmp_path, loss_type=["hinge", "sft"], margin_normalization="source")
    for each in informed:
        config(tmp_path, **each, loss_type=["sigmoid", "sft"])


def changed(row, **values):
    rows = pairs().to_list()
    rows[row] |= values
    return Dataset.from_list(rows)


def test_bad_numbers_of_pairs_are_refused(subtests, tmp_path):
    for values in ({"confidence": 0.4}, {"confidence": math.nan}, {"weight": -0.5}, {"weight": None}):
        for kwargs in ({"train_dataset": changed(6, **values)}, {"eval_dataset": {"hard": changed(6, **values)}}):
            name = "eval 'hard'" if "eval_dataset" in kwargs else "train"
            message = f"The {name} dataset, row 6: `{next(iter(values))}` must be"
            with subtests.test(values=values, name=name), pytest.raises(ValueError, match=message):
                make_trainer(tmp_path, trainer_kwargs=kwargs, **INFORMED)
    stream = {"trainer_kwargs": {"train_dataset": pairs().to_iterable_dataset()}}
    with pytest.raises(ValueError, match="needs `drift_horizon`"):
        make_trainer(tmp_path, **stream, beta_controller="drift", drift_target=1.0)
    make_trainer(tmp_path, **stream, **DRIFT, use_confidence=True, max_steps=2).train()


@pytest.mark.slow
def test_log_probs_that_are_not_finite_end_the_run(tmp_path):
    assert "log-probs of the policy or the reference are not finite" in broken_weight(tmp_path)
    reference = tiny_llama()
    with torch.no_grad():
        reference.lm_head.weight.fill_(torch.inf)
    for options in ({}, DRIFT, {"precompute_ref_log_probs": True}):
        with pytest.raises(FloatingPointError, match="At step 0"):
            make_trainer(tmp_path, trainer_kwargs={"ref_model": reference}, **options).train()
