"""Names of reward functions: under `rewards/<name>/…` they stand in the logs."""

import re


def checked_name(name: str | None, default: str) -> str:
    """Return `name`, or the default where it is None, with `_` for each run of characters that no name may have."""
    if name is None:
        return re.sub(r"_?[^\w.-]+_?", "_", default, flags=re.ASCII).strip("_") or "reward"
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name, re.ASCII):
        raise ValueError(f"`name` may have letters, digits, '_', '-' and '.', got {name!r}")
    return name
