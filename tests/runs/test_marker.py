"""The marker is the last thing on the disk, and any part of a large file counts."""

import json
import os
import time

import pytest
from transformers import TrainingArguments

from trl_ext.runs.checkpoints import CannotResume, checkpoint_to_resume, newest_complete
from trl_ext.runs.marker import (
    MARKER,
    IncompleteCheckpoint,
    _checksum,
    check_files,
    file_hash,
    read_marker,
    write_marker,
)


def test_all_else_is_on_the_disk_before_the_marker(tmp_path, monkeypatch):
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
    write_marker(str(folder), {"seed": 1}, processes=2)

    swap = done.index("replace")
    assert set(done[:swap]) == {*names, "critic", f"{MARKER}.tmp"} and done[swap - 1] == f"{MARKER}.tmp"
    assert done[swap + 1 :] == [".", ".."]
    marker = read_marker(str(folder))
    assert (
        marker["configuration"] == {"seed": 1}
        and marker["processes"] == 2
        and sorted(marker["files"]) == sorted(names)
    )
    check_files(str(folder), marker)


def test_a_clock_that_was_set_back_does_not_make_a_checkpoint_older(tmp_path, monkeypatch):
    """Neither for us, nor for transformers, which deletes the oldest ones."""
    for step in (2, 4):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}/model.safetensors").write_text("weights")
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now + 3600 * 10**9)
    write_marker(str(tmp_path / "checkpoint-2"), {}, 1)
    monkeypatch.setattr(time, "time_ns", lambda: now)
    write_marker(str(tmp_path / "checkpoint-4"), {}, 1)
    assert newest_complete(str(tmp_path))[0] == str(tmp_path / "checkpoint-4")
    assert os.path.getmtime(tmp_path / "checkpoint-4") > os.path.getmtime(tmp_path / "checkpoint-2")


def test_only_what_is_named_as_a_checkpoint_is_one(tmp_path):
    for name in ("checkpoint-2", "checkpoint-bad-6", "checkpoint-old-4", "checkpoint-²", "checkpoint-x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("weights")
        write_marker(str(tmp_path / name), {}, 1)
    (tmp_path / "checkpoint-7").write_text("a file")
    (tmp_path / "checkpoint-8").symlink_to("nowhere")
    assert newest_complete(str(tmp_path)) == (str(tmp_path / "checkpoint-2"), {})


@pytest.mark.parametrize("name", ["written_ns", "configuration", "files", "a file"])
@pytest.mark.parametrize("value", [None, 1.5, "x", [], {"a": 1}])
def test_whatever_a_marker_says_is_no_traceback(name, value, tmp_path):
    """As one of another trl_ext may, which has its own checksum."""
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    (folder / "model.safetensors").write_text("weights")
    write_marker(str(folder), {}, 1)
    marker = read_marker(str(folder))
    if name == "a file":
        marker["files"]["model.safetensors"] = value
    else:
        marker[name] = value
    (folder / MARKER).write_text(json.dumps({**marker, "checksum": _checksum(marker)}))
    found, skipped = newest_complete(str(tmp_path))
    assert found == str(folder) or "damaged" in skipped[str(folder)] or "missing" in skipped[str(folder)]


@pytest.mark.parametrize("size", [0, 1, 2**20 - 1, 2**20, 2**20 + 1, 5 * 2**20 + 3, 64 * 2**20])
def test_a_hash_covers_every_byte_of_a_file_of_up_to_64_mib(size, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(size))
    hashes = {file_hash(path)}
    places = sorted({place for place in (0, size // 3, size // 2, size - 1, 2**20 - 1, 2**20) if 0 <= place < size})
    for place in places:
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"x")
        hashes.add(file_hash(path))
    assert len(hashes) == 1 + len(places)


def test_a_file_that_cannot_be_read_ends_every_process_by_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "model.safetensors").touch()
    write_marker(str(tmp_path / "checkpoint-3"), {}, processes=1)

    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("trl_ext.runs.marker.file_hash", denied)
    with pytest.raises(CannotResume, match=r"cannot be read \(.*Permission denied: .*model.safetensors"):
        checkpoint_to_resume(TrainingArguments(str(tmp_path)))


def test_of_a_larger_file_the_start_and_the_end_count(tmp_path):
    path = tmp_path / "file"
    size = 300 * 2**20
    path.touch()
    os.truncate(path, size)  # sparse
    hashes = {file_hash(path)}
    for place in (0, 2**20 - 1, size - 2**20, size - 1):
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"x")
        hashes.add(file_hash(path))
    os.truncate(path, size + 1)
    assert len(hashes | {file_hash(path)}) == 6

    zeros = set()
    for more in range(3):  # the same pieces: the size counts
        path.write_bytes(b"")
        os.truncate(path, size + more)
        zeros.add(file_hash(path))
    assert len(zeros) == 3


def test_what_is_not_as_it_was_written_is_said_and_a_model_card_may_change(tmp_path):
    (tmp_path / "critic").mkdir()
    for name in ("model.bin", "README.md", "critic/README.md", f"{MARKER}.tmp"):  # the last one of a killed run
        (tmp_path / name).write_text("text")
    write_marker(str(tmp_path), {}, 1)
    marker = read_marker(str(tmp_path))
    for name in ("README.md", "critic/README.md"):
        (tmp_path / name).write_text("pushed to the hub")
    check_files(str(tmp_path), marker)

    for contents, message in [
        ("tex", "has 3 bytes, but 4 were written"),
        ("texx", "is damaged"),
        (None, "is missing"),
    ]:
        (tmp_path / "model.bin").unlink() if contents is None else (tmp_path / "model.bin").write_text(contents)
        with pytest.raises(IncompleteCheckpoint, match=f"model.bin {message}"):
            check_files(str(tmp_path), marker)

    whole = (tmp_path / MARKER).read_text()
    for contents in ("", "[]", "{}", "3", "null", whole[:-9], whole.replace('"processes": 1', '"processes": 2')):
        (tmp_path / MARKER).write_text(contents)
        with pytest.raises(IncompleteCheckpoint, match="is damaged, or was written by an earlier trl_ext"):
            read_marker(str(tmp_path))
