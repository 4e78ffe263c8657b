"""Write rows as a file of JSON lines."""

import json
from collections.abc import Iterable
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from ..runs.files import whole_file
from ..runs.jsonl import without_nan


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows to a file of JSON lines, whole or not at all; NaN and infinities become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Half of a surrogate pair has no UTF-8; written as \udXXX, JSON reads it back as it was
    with (
        whole_file(path) as temporary,
        temporary.open("w", encoding="utf-8", errors="backslashreplace") as file,
    ):
        for row in rows:
            try:
                line = json.dumps(row, ensure_ascii=False, allow_nan=False, default=_as_text)
            except ValueError:  # NaN, which JSON does not have
                line = json.dumps(without_nan(row), ensure_ascii=False, default=_as_text)
            file.write(line + "\n")


def _as_text(value: Any) -> str:
    if isinstance(value, (date, time, timedelta, Decimal)):
        return str(value)
    raise ValueError(f"a {type(value).__name__} cannot be written as JSON: leave its column out")
