"""A run that goes on from a checkpoint ends as if it had never stopped, and no other run is gone on with."""

import pytest
from torch.testing import assert_close

from tests.dpo.worker import BETA_DPO, DRIFT, INFORMED, NORMALIZED, end_of, logged, make_trainer, resumed
from tests.tiny import tiny_llama

SAVING = {"save_strategy": "steps", "save_steps": 3}


@pytest.mark.parametrize(
    "options",
    [
        {**DRIFT, **NORMALIZED, "gradient_accumulation_steps": 2},
        pytest.param({**BETA_DPO, **INFORMED, **NORMALIZED}, marks=pytest.mark.slow),
        pytest.param({**DRIFT, "precompute_ref_log_probs": True}, marks=pytest.mark.slow),
    ],
    ids=lambda options: " ".join(options),
)
def test_resuming_is_exact(options, tmp_path):
    whole, again = resumed(tmp_path, **options)
    assert_close(again, whole, rtol=0, atol=0)
    assert whole["beta"] != 0.1


@pytest.mark.slow
def test_beta_goes_on_also_with_other_data(tmp_path):
    """`ignore_data_skip` takes another way through the Trainer."""
    options = {**DRIFT, "ignore_data_skip": True}
    saving = make_trainer(tmp_path, **SAVING, **options)
    saving.train()
    again = make_trainer(tmp_path, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    # The first step after the checkpoint uses the β that the third step ended with
    assert logged(again, "beta")[3] == logged(saving, "beta")[3] != 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({}, DRIFT, "beta_controller: 'fixed' → 'drift'"),
        (DRIFT, {**DRIFT, **NORMALIZED}, "margin_normalization: 'none' → 'source'"),
        ({}, {"learning_rate": 5e-4}, "learning_rate: 0.001 → 0.0005"),
    ],
)
def test_other_settings_are_said_and_used(before, after, message, tmp_path, capsys):
    make_trainer(tmp_path, **SAVING, max_steps=3, **before).train()
    trainer = make_trainer(tmp_path, **SAVING, **after)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 6 and message in capsys.readouterr().out
    if after == DRIFT:
        assert logged(trainer, "beta")[0] == pytest.approx(0.1, rel=0.2)  # begins anew
    make_trainer(tmp_path, **after).train(resume_from_checkpoint=True)  # its own checkpoints are like any other's
    assert "written with other settings" not in capsys.readouterr().out


@pytest.mark.slow
def test_another_base_reference_or_adapter_is_refused(tmp_path):
    reference = {"ref_model": tiny_llama(seed=5)}
    make_trainer(tmp_path, None, dict(reference), **SAVING, max_steps=3).train()
    for model, given, message in [
        (tiny_llama(seed=1), {}, "with model: "),
        (None, {"ref_model": tiny_llama(seed=6)}, "with reference"),
    ]:
        with pytest.raises(ValueError, match=message):
            make_trainer(tmp_path, model, {**reference, **given}, max_steps=3).train(True)


@pytest.mark.slow
def test_a_reference_that_moves_goes_on_from_where_it_was(tmp_path):
    options = {**SAVING, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}
    whole = make_trainer(tmp_path, **options)
    whole.train()
    half = tmp_path / "checkpoint-3"
    again = make_trainer(tmp_path / "again", **options)
    again.train(str(half))
    assert_close(end_of(again), end_of(whole), rtol=0, atol=0)
    assert_close(again.ref_model.state_dict(), whole.ref_model.state_dict(), rtol=0, atol=0)
    complete = make_trainer(tmp_path, **options)
    complete.train(True)  # which loads it, and is evaluated against its reference
    assert_close(complete.ref_model.state_dict(), whole.ref_model.state_dict(), rtol=0, atol=0)
