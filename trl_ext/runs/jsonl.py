"""Write JSON lines that survive a killed run and never stop a run; convert values to those that JSON can hold."""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard


def finite(value: Any) -> Any:
    """Convert a value to JSON's types: arrays and tensors to lists of numbers, NaN and other objects to text."""
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    if hasattr(value, "tolist"):
        return finite(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def without_nan(value: Any) -> Any:
    """Replace NaN and infinities within the value by None: JSON has no such numbers."""
    if isinstance(value, dict):
        return {key: without_nan(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def is_finite_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a finite int or float; a bool does not count."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


class JSONLWriter:
    """
    Append JSON objects to a file, each on a line of its own.

    Each line goes to the operating system at once, so `kill -9` loses at most the line being written. If the file
    cannot be written, one warning says so, and the lines are lost.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._file: Any = None
        self._failed = False

    def write(self, *rows: dict[str, Any]) -> None:
        if self._failed or not rows:
            return
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                torn = _ends_in_mid_line(self.path)
                # Half of a surrogate pair has no UTF-8; written as \udXXX, JSON reads it back as it was
                self._file = self.path.open("a", encoding="utf-8", errors="backslashreplace")
                if torn:
                    self._file.write("\n")
            self._file.writelines(json.dumps(finite(row), ensure_ascii=False) + "\n" for row in rows)
            self._file.flush()
        except OSError as error:
            self._failed = True
            from transformers.utils import logging  # here: who only reads files needs no transformers

            logging.get_logger(__name__).warning(
                f"{self.path} cannot be written ({error.strerror}): nothing more is written to it."
            )


def _ends_in_mid_line(path: Path) -> bool:
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def read_jsonl(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """
    Yield the objects of a file of JSON lines.

    Incomplete lines are skipped: a run leaves one if it is killed, or is still writing.
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row
