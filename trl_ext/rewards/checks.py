"""Check the settings of rewards, and pickle rewards by their settings."""

import re
import threading
from typing import Any, Literal

from ..runs.jsonl import is_finite_number

OnError = Literal["raise", "skip"] | float


def checked_name(name: str | None, default: str) -> str:
    """
    Return `name`, a reward's key in the logs; raise a `ValueError` unless it has only letters, digits, `_`, `-`, `.`.

    If `name` is None, return `default` with `_` in place of all other characters.
    """
    if name is None:
        return re.sub(r"_?[^\w.-]+_?", "_", default, flags=re.ASCII).strip("_") or "reward"
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name, re.ASCII):
        raise ValueError(f"`name` may have only letters, digits, '_', '-' and '.', got {name!r}")
    return name


def check_on_error(on_error: Any) -> OnError:
    """Return `on_error`; raise a `ValueError` unless it is `"raise"`, `"skip"` or a finite number."""
    if not (on_error in ("raise", "skip") or is_finite_number(on_error)):
        raise ValueError(f"`on_error` must be 'raise', 'skip' or a finite number, got {on_error!r}")
    return on_error


def check_function(**functions: Any) -> None:
    """Raise a `TypeError` unless each value can be called and is not a class."""
    for name, function in functions.items():
        if not callable(function) or isinstance(function, type):
            raise TypeError(f"`{name}` must be a reward function, got {function!r}")


def check_counts(least: int = 1, **counts: Any) -> None:
    """Raise a `ValueError` unless each value is a whole number of `least` or more."""
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"`{name}` must be a whole number of {least} or more, got {value!r}")


def check_seconds(most: float = threading.TIMEOUT_MAX, **seconds: float) -> None:
    """Raise a `ValueError` unless each value is above 0 and at most `most`, by default a thread's longest wait."""
    for name, value in seconds.items():
        if not 0 < value <= most:
            raise ValueError(f"`{name}` must be more than 0 seconds, and at most {most:g}, got {value!r}")


def check_finite(**numbers: Any) -> None:
    """Raise a `ValueError` unless each value is a finite number."""
    for name, value in numbers.items():
        if not is_finite_number(value):
            raise ValueError(f"`{name}` must be a finite number, got {value!r}")
