"""What a stop leaves in a folder, and which checkpoint counts as the newest."""

import os
import time
from types import SimpleNamespace

import pytest
from trl import SFTConfig

from trl_ext.runs.checkpoints import checkpoint_to_resume, fingerprint, newest_complete
from trl_ext.runs.halts import STOPPED, forget_stop, stop_of, write_stop
from trl_ext.runs.marker import MARKER, write_marker


def saved(folder, *names):
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "model.safetensors").write_text(name)
        write_marker(str(folder / name), {}, 1)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}'])
def test_a_record_that_cannot_be_read_still_says_that_the_run_was_ended(text, tmp_path):
    assert stop_of(str(tmp_path), "look") is None
    (tmp_path / STOPPED).write_text(text)
    assert "A monitor ended this run" in stop_of(str(tmp_path), "look")
    write_stop(str(tmp_path), "KLBudgetCallback", 8, "too far")
    assert "KLBudgetCallback ended this run at step 8 (too far)" in stop_of(str(tmp_path), "look")
    forget_stop(str(tmp_path))
    assert not (tmp_path / STOPPED).exists()


def test_the_newest_checkpoint_is_the_complete_one_that_was_finished_last(tmp_path):
    """Not the one with the highest step, which an earlier run may have left, and not a copy of another name."""
    saved(tmp_path, "checkpoint-10", "checkpoint-3", "checkpoint-5", "checkpoint-6", "checkpoint-copy")
    (tmp_path / "checkpoint-6" / MARKER).write_text("[]")
    (tmp_path / "checkpoint-5" / "model.safetensors").write_text("damage")
    os.utime(tmp_path / "checkpoint-10", ns=(time.time_ns() + 10**12,) * 2)
    found, skipped = newest_complete(str(tmp_path))
    assert found == str(tmp_path / "checkpoint-3")
    assert sorted(skipped) == [str(tmp_path / f"checkpoint-{step}") for step in (5, 6)]


@pytest.mark.parametrize(
    ("asked", "passed"),
    [("true", True), ("True", True), (True, True), ("false", False), ("FALSE", False), ("a/path", "a/path")],
)
def test_what_a_recipe_asks_for(asked, passed, tmp_path):
    assert checkpoint_to_resume(SimpleNamespace(resume_from_checkpoint=asked, output_dir=str(tmp_path))) == passed


def test_a_token_is_no_setting_of_a_run_also_in_trls_own_arguments(tmp_path):
    with_token, without = (
        fingerprint(SFTConfig(str(tmp_path), bf16=False, model_init_kwargs=given), api_key="plain", facts=1)
        for given in ({"token": "plain"}, None)
    )
    assert with_token == without and "plain" not in str(with_token) and with_token["facts"] == 1
