"""Settings that cannot work raise when the configuration is made, with what to do instead."""

import dataclasses
import warnings

import pytest
import trl

from tests.dpo.worker import config, make_trainer, pairs
from trl_ext import DPOConfig, DPOTrainer


def test_every_field_of_trl_keeps_its_default(tmp_path):
    ours, theirs = (cls(str(tmp_path), use_cpu=True) for cls in (DPOConfig, trl.DPOConfig))
    for field in dataclasses.fields(theirs):
        if field.name not in ("bf16", "logging_dir", "distributed_state", "mixed_precision"):
            assert getattr(ours, field.name) == getattr(theirs, field.name), field.name
    assert not ours.reads_log_probs and not ours.replaces_sigmoid


def test_what_dpo_no_longer_takes_python_refuses_and_an_unknown_loss_trl_does(tmp_path):
    with pytest.raises(TypeError, match="unexpected keyword argument 'rpo_alpha'"):
        config(tmp_path, rpo_alpha=1.0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'tokenizer'"):
        DPOTrainer("model", args=config(tmp_path), tokenizer=1)
    for options in ({}, {"log_displacement": True}):
        with pytest.raises(ValueError, match="Unknown loss type: kto_pair. Should be one of"):
            make_trainer(tmp_path, loss_type="kto_pair", **options).train()


DRIFT = {"beta_controller": "drift", "drift_target": 1.0}


def test_settings_that_cannot_work_are_named(subtests, tmp_path):
    for given, message in [
        ({"beta": 0.0}, "`beta` must be > 0 and finite, got 0.0"),
        ({"beta_dpo_keep": 0.8}, "`beta_dpo_keep=0.8` needs `beta_controller='beta_dpo'`"),
        (
            {"beta_controller": "drift"},
            "needs `drift_target`, in nats per sequence. Run once with `log_displacement=True`",
        ),
        ({**DRIFT, "beta_min": 0.2}, r"`beta=0.1` must lie within \[`beta_min`, `beta_max`\] = \[0.2, None\]"),
        (
            {"label_smoothing": 0.1},
            "has no effect on .*set `use_confidence=True` .* of 0.9, or use `loss_type='robust'`",
        ),
        ({**DRIFT, "loss_type": "sft"}, r"`beta_controller='drift'` moves β, but `loss_type=\['sft'\]` has no β"),
        ({"margin_normalization": "source", "loss_type": "sft"}, "`margin_normalization='source'` moves β"),
        (
            {"use_weight": True, "use_weighting": True},
            "`use_weight` need .* and `use_weighting=False`. Got .*`use_weighting=True`",
        ),
    ]:
        with subtests.test(given=given), pytest.raises(ValueError, match=message):
            config(tmp_path, **given)


def test_only_losses_of_beta_times_margin_are_normalized(tmp_path):
    assert config(tmp_path, loss_type=["hinge", "sft"], margin_normalization="source").loss_type == ["hinge", "sft"]
    with pytest.raises(ValueError, match=r"losses of β times the margin only: .*Got `loss_type=\['ipo', 'sft'\]`"):
        config(tmp_path, loss_type=["ipo", "sft"], margin_normalization="source")


def test_pair_information_is_for_the_sigmoid_loss_with_reverse_kl(subtests, tmp_path):
    for other in [{"loss_type": "hinge"}, {"f_divergence_type": "js_divergence"}]:
        for option in ["use_margin", "use_confidence", "use_weight", "dpop_lambda", "beta_dpo_keep"]:
            with subtests.test(option=option, other=other):
                given = {option: {"dpop_lambda": 1.0, "beta_dpo_keep": 0.5}.get(option, True)}
                given |= {"beta_controller": "beta_dpo"} if option == "beta_dpo_keep" else {}
                with pytest.raises(ValueError, match=f"`{option}` need `loss_type` 'sigmoid'"):
                    config(tmp_path, **given, **other)
                config(tmp_path, **given, loss_type=["sigmoid", "sft"])


def test_beta_dpo_warns_of_a_small_batch(tmp_path):
    for size, warns in ((4, True), (8, False)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make_trainer(tmp_path, beta_controller="beta_dpo", per_device_train_batch_size=size)
        assert any("over all processes that has only 4 pairs" in str(w.message) for w in caught) is warns


def test_the_horizon_is_the_pairs_of_an_epoch(tmp_path):
    assert make_trainer(tmp_path, **DRIFT).beta_controller.horizon == len(pairs())
    assert make_trainer(tmp_path, **DRIFT, drift_horizon=7.0).beta_controller.horizon == 7
