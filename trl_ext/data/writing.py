"""Rows as a file of JSON lines."""

import json
import math
from collections.abc import Iterable
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """JSON lines, in place when complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    # Half of a surrogate pair has no UTF-8; written as \udXXX, JSON reads it back as it was
    with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for row in rows:
            try:
                line = json.dumps(row, ensure_ascii=False, allow_nan=False, default=_as_text)
            except ValueError:  # NaN, which JSON does not have
                line = json.dumps(_without_nan(row), ensure_ascii=False, default=_as_text)
            file.write(line + "\n")
    temporary.replace(path)


def _as_text(value: Any) -> str:
    if isinstance(value, (date, time, timedelta, Decimal)):
        return str(value)
    raise ValueError(f"a {type(value).__name__} cannot be written as JSON: leave its column out")


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
