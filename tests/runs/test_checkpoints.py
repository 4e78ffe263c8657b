"""The marker is written last, incomplete checkpoints are not resumed from, and a stop is reported."""

import json
import os
import time
from types import SimpleNamespace

import pytest
from trl import SFTConfig

from trl_ext.runs.checkpoints import ResumableRun, checkpoint_to_resume, differences, fingerprint
from trl_ext.runs.control import STOPPED, delete_stop, read_stop, write_stop
from trl_ext.runs.saving import MARKER, delete_old, newest_complete, read_marker, write_marker


def saved(folder, *names):
    for name in names:
        (folder / name / "critic").mkdir(parents=True)
        for file in ("model.safetensors", "critic/config.json"):
            (folder / name / file).write_text(name)
        write_marker(folder / name, {"seed": 1})


def test_the_marker_is_written_last(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoint-3"
    (folder / "critic").mkdir(parents=True)
    names = ["model.safetensors", "critic/config.json", "optimizer.pt"]
    for name in names:
        (folder / name).write_text(name)
    done, fsync, replace = [], os.fsync, os.replace

    def flushed(handle):
        done.append(os.path.relpath(os.readlink(f"/proc/self/fd/{handle}"), folder))
        fsync(handle)

    def replaced(*paths):
        done.append("replace")
        replace(*paths)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", replaced)
    assert write_marker(folder, {"seed": 1}) == sum(map(len, names))

    swap = done.index("replace")
    assert set(done[:swap]) == {*names, "critic", f"{MARKER}.tmp"} and done[swap - 1] == f"{MARKER}.tmp"
    assert done[swap + 1 :] == [".", ".."]
    marker = read_marker(folder)
    assert marker["configuration"] == {"seed": 1} and sorted(marker["files"]) == sorted(names)


def test_the_newest_checkpoint_is_the_last_complete_one(tmp_path, capsys):
    """Not the one with the highest step, which an earlier run may have left, and not a renamed copy."""
    saved(tmp_path, "checkpoint-10", "checkpoint-3", *(f"checkpoint-{step}" for step in (4, 5, 6, 7)))
    saved(tmp_path, "checkpoint-copy", "checkpoint-²")
    os.utime(tmp_path / "checkpoint-10", ns=(time.time_ns() + 10**12,) * 2)
    (tmp_path / "checkpoint-3" / "README.md").write_text("pushed to the hub")
    (tmp_path / "checkpoint-4" / "model.safetensors").write_text("damage")
    (tmp_path / "checkpoint-5" / "critic/config.json").unlink()
    marker = (tmp_path / "checkpoint-6" / MARKER).read_text()
    (tmp_path / "checkpoint-8").symlink_to("nowhere")
    (tmp_path / "checkpoint-7" / MARKER).unlink()
    for text in ("", "[]", "{}", "3", "null", '{"files": 3}', marker[:-9]):
        (tmp_path / "checkpoint-6" / MARKER).write_text(text)
        assert newest_complete(tmp_path) == str(tmp_path / "checkpoint-3")
        assert capsys.readouterr().out.count("Skipping") == 5


def test_old_checkpoints_are_deleted_incomplete_ones_first(tmp_path):
    saved(tmp_path, *(f"checkpoint-{step}" for step in (1, 2, 3, 4, 5)))
    (tmp_path / "checkpoint-4" / MARKER).unlink()
    left = lambda: sorted(int(path.name[11:]) for path in tmp_path.glob("checkpoint-*"))  # noqa: E731
    for limit, steps in ((None, [1, 2, 3, 4, 5]), (4, [1, 2, 3, 5]), (2, [1, 5]), (1, [1, 5])):
        delete_old(tmp_path / "checkpoint-5", limit, "checkpoint-1")
        assert left() == steps
    saved(tmp_path, "checkpoint-6")
    os.utime(tmp_path / "checkpoint-6", (0, 0))  # the clock was set back
    delete_old(tmp_path / "checkpoint-6", 1, None)
    assert left() == [6]


@pytest.mark.parametrize(
    ("asked", "passed"), [("true", True), (True, True), ("FALSE", False), ("a/path", "a/path"), (None, None)]
)
def test_which_checkpoint_a_recipe_resumes(asked, passed, tmp_path):
    assert checkpoint_to_resume(SimpleNamespace(resume_from_checkpoint=asked, output_dir=str(tmp_path))) == passed


def test_a_token_is_no_setting_of_a_run(tmp_path):
    one, other = (
        fingerprint(SFTConfig(str(tmp_path), bf16=False, model_init_kwargs={"token": token}), api_key=token, facts=1)
        for token in ("plain", "other")
    )
    assert one == other and "plain" not in str(one) and one["facts"] == 1
    assert differences(one, {**other, "facts": 2, "seed": 7, "new": "x"}) == [
        "facts: 1 → 2",
        "new: None → 'x'",
        "seed: 42 → 7",
    ]


def test_a_stop_holds_though_its_record_cannot_be_read(tmp_path):
    assert read_stop(str(tmp_path), "look") is None
    write_stop(str(tmp_path), "KLBudgetCallback", 8, "too far")
    assert json.loads((tmp_path / STOPPED).read_text())["step"] == 8
    assert "KLBudgetCallback ended this run at step 8 (too far)" in read_stop(str(tmp_path), "look")
    (tmp_path / STOPPED).write_text("{")
    assert "A monitor ended this run" in read_stop(str(tmp_path), "look")
    delete_stop(str(tmp_path))
    assert not (tmp_path / STOPPED).exists()


def test_a_dataset_that_is_given_by_position_is_an_error():
    """Its fingerprint would not be compared when the run resumes."""
    with pytest.raises(TypeError, match="positional"):
        ResumableRun("model", None, None, [{"text": "tea"}])  # arguments, collator, dataset
