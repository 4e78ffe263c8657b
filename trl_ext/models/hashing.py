"""Hash files of any size in about a second. It imports neither torch nor transformers."""

import os

import xxhash

_PIECE, _PIECES = 2**20, 64


def file_hash(path: str | os.PathLike[str]) -> str:
    """
    Hash a file by its size and content; of more than 64 MiB, by 64 pieces of 1 MiB, evenly spread from start to end.

    So a checkpoint of any size is compared in about a second. It guards against damage, not against anyone.
    """
    size = os.path.getsize(path)
    count = min(_PIECES, -(-size // _PIECE))
    digest = xxhash.xxh3_128(str(size).encode())
    with open(path, "rb") as file:
        for i in range(count):
            file.seek(i * (size - _PIECE) // (count - 1) if i else 0)  # the last one ends with the file
            digest.update(file.read(_PIECE))
    return digest.hexdigest()
