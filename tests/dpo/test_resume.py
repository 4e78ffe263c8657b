"""A resumed run ends as the uninterrupted one, and a checkpoint of another run is refused."""

import pytest
from torch.testing import assert_close

from tests.dpo.worker import DRIFT, INFORMED, NORMALIZED, end_of, make_trainer, resumed
from tests.tiny import tiny_llama

SAVING = {"save_strategy": "steps", "save_steps": 3}


@pytest.mark.parametrize(
    "options",
    [
        {**DRIFT, **NORMALIZED, "gradient_accumulation_steps": 2},
        pytest.param({**DRIFT, **INFORMED, **NORMALIZED}, marks=pytest.mark.slow),
        pytest.param({**DRIFT, "precompute_ref_log_probs": True}, marks=pytest.mark.slow),
    ],
    ids=lambda options: " ".join(options),
)
def test_resuming_is_exact(options, tmp_path):
    whole, again = resumed(tmp_path, **options)
    assert_close(again, whole, rtol=0, atol=0)
    assert whole["beta"] != 0.1


def test_another_beta_is_used_from_the_next_step_on(tmp_path):
    make_trainer(tmp_path, **DRIFT, **SAVING, max_steps=3).train()
    trainer = make_trainer(tmp_path, **DRIFT, beta=0.7, max_steps=4)
    trainer.train(True)
    assert 0.7 * 0.8 <= trainer.beta <= 0.7 * 1.2


@pytest.mark.slow
def test_another_reference_is_refused(tmp_path):
    make_trainer(tmp_path, None, {"ref_model": tiny_llama(seed=5)}, **SAVING, max_steps=3).train()
    with pytest.raises(ValueError, match="with reference"):
        make_trainer(tmp_path, None, {"ref_model": tiny_llama(seed=6)}, max_steps=3).train(True)


@pytest.mark.slow
def test_a_reference_that_moves_is_resumed(tmp_path):
    options = {**SAVING, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}
    whole = make_trainer(tmp_path, **options)
    whole.train()
    half = tmp_path / "checkpoint-3"
    again = make_trainer(tmp_path / "again", **options)
    again.train(str(half))
    assert_close(end_of(again), end_of(whole), rtol=0, atol=0)
    assert_close(again.ref_model.state_dict(), whole.ref_model.state_dict(), rtol=0, atol=0)
    complete = make_trainer(tmp_path, **options)
    complete.train(True)  # it loads the checkpoint, and is evaluated against the reference there
    assert_close(complete.ref_model.state_dict(), whole.ref_model.state_dict(), rtol=0, atol=0)
