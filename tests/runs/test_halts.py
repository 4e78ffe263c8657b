"""What a rollback leaves in a folder, whenever power is lost, and which checkpoint counts as the newest."""

import os
import time
from types import SimpleNamespace

import pytest
from trl import SFTConfig

from trl_ext.runs.checkpoints import checkpoint_to_resume, fingerprint, newest_complete
from trl_ext.runs.halts import ASIDE, RECORD, Rollback, digest, good_checkpoint
from trl_ext.runs.marker import MARKER, write_marker


def saved(folder, *names):
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "model.safetensors").write_text(name)
        write_marker(str(folder / name), {}, 1)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def rollback(step=8, good_step=4):
    return Rollback(step, good_step, None, "KLBudgetCallback", "too far", {}, {})


def test_a_rollback_renames_what_comes_after_the_good_step_and_nothing_else(tmp_path):
    saved(tmp_path, "checkpoint-2", "checkpoint-4", "checkpoint-6", "checkpoint-8", "checkpoint-last")
    (tmp_path / "checkpoint-9").write_text("no folder")
    record = rollback()
    assert good_checkpoint(str(tmp_path), 4) == str(tmp_path / "checkpoint-4")
    assert good_checkpoint(str(tmp_path), 1) is None
    before = [record.is_before(f"checkpoint-{step}") for step in (2, 4, 6, "last")]
    assert before == [True, True, False, False] and not record.is_before("4")
    record.write(str(tmp_path))
    kept = ["checkpoint-2", "checkpoint-4", "checkpoint-9", "checkpoint-last"]
    assert names(tmp_path) == sorted([*kept, RECORD, f"{ASIDE}-8-checkpoint-6", f"{ASIDE}-8-checkpoint-8"])
    assert Rollback.read(str(tmp_path)) == record

    # The next run comes as far again: its checkpoints are its own, and when it is rolled back they get other names
    saved(tmp_path, "checkpoint-6")
    later = record.written_ns + 1  # a file system's clock may be some milliseconds behind
    os.utime(tmp_path / "checkpoint-6", ns=(later, later))
    assert record.set_aside(str(tmp_path)) == []
    rollback().write(str(tmp_path))
    assert f"{ASIDE}-8-checkpoint-6-1" in names(tmp_path) and "checkpoint-6" not in names(tmp_path)


@pytest.mark.parametrize("lost_after", ["nothing", "fsync", "replace"])
def test_power_that_is_lost_in_a_rollback_leaves_no_bad_checkpoint_to_go_on_from(lost_after, tmp_path, monkeypatch):
    """The record is on the disk under its name, or nothing has happened yet; only then is anything renamed."""
    folder, done = tmp_path / "run", []
    saved(folder, "checkpoint-4", "checkpoint-6")

    def dies_after(name):
        function = getattr(os, name)

        def call(*args):
            function(*args)
            done.append(name)
            if name == lost_after:
                raise KeyboardInterrupt

        monkeypatch.setattr(os, name, call)

    for name in ("fsync", "replace"):
        dies_after(name)
    try:
        rollback().write(str(folder))
    except KeyboardInterrupt:
        assert (folder / "checkpoint-6").exists()
    # The file, its name, and the folder that has the name
    assert done == ["fsync", "replace", "fsync"][: {"fsync": 1, "replace": 2, "nothing": 3}[lost_after]]
    newest = folder / ("checkpoint-6" if lost_after == "fsync" else "checkpoint-4")
    assert newest_complete(str(folder))[0] == str(newest)


def test_a_folder_that_is_not_there_gets_the_record(tmp_path):
    rollback().write(str(tmp_path / "run"))
    assert names(tmp_path / "run") == [RECORD]


def test_a_digest_is_of_the_settings_not_of_their_order():
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 1, "b": 3})


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
