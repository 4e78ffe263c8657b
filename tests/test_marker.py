"""The marker is the last thing on the disk, and any part of a large file counts."""

import os

import pytest

from trl_ext.marker import MARKER, check_files, file_hash, read_marker, write_marker


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
