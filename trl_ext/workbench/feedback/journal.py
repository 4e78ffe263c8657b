"""Write each answer of a model to a file as soon as it is known: nothing is asked twice, not even after `kill -9`."""

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...runs import read_jsonl


class Journal:
    """
    Append answers to a file of JSON lines, one line for each question, and read the answers that are in it.

    Args:
        path: the file.
        by: identity of the model, and of all else that its answers depend on.
        names: keys of a row whose values together name the question.

    Raises:
        ValueError: the file has answers by another model, rubric, constitution or setting.
    """

    def __init__(self, path: Path, by: str, names: Sequence[str]):
        self.path, self.by, self.names = path, by, names
        self._lock = threading.Lock()
        found = list(read_jsonl(path)) if path.exists() else []
        if others := sum(row.get("by") != by for row in found):
            raise ValueError(
                f"{path} has {others} answers that were made with another model, rubric, constitution or model "
                "setting: choose another `output_dir`, or go back to the earlier model and settings"
            )
        self.rows: dict[tuple, dict[str, Any]] = {tuple(row[name] for name in names): row for row in found}
        self.models = {row["model"] for row in found if "model" in row}
        path.parent.mkdir(parents=True, exist_ok=True)
        is_torn = bool(found) and not path.read_bytes().endswith(b"\n")
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace")
        if is_torn or (not found and path.stat().st_size):  # the line that a killed run was writing
            self._file.write("\n")

    def add(self, row: dict[str, Any]) -> None:
        """Write a row; the operating system has it when this returns. Raise an `OSError` if the disk is full."""
        row = {**row, "by": self.by}
        with self._lock:
            self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
            self._file.flush()
            self.rows[tuple(row[name] for name in self.names)] = row

    def missing(self, questions: list[Any]) -> list[Any]:
        """Return those questions to which the journal has no answer."""
        return [question for question in questions if question.name not in self.rows]
