"""Suggest the correct name for a mistyped name."""

import difflib
import os
from collections.abc import Iterable
from pathlib import Path


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return `; did you mean A or B?` with the `names` that are most similar to `name`; "" if none is similar."""
    known = sorted(names)
    begun = [longer for longer in known if longer.startswith(name)]
    nearest = begun[:4] or difflib.get_close_matches(name, known)
    return f"; did you mean {' or '.join(nearest)}?" if nearest else ""


def near_path(path: str | os.PathLike[str]) -> str:
    """
    Return `; did you mean …?` for a path that does not exist; "" if there is no similar path.

    Similar names are looked for in the last folder of the path that exists.
    """
    path, rest = Path(path).expanduser(), Path()
    while not path.parent.is_dir():
        path, rest = path.parent, path.name / rest
    try:
        nearest = difflib.get_close_matches(path.name, sorted(os.listdir(path.parent)))
    except OSError:  # a folder that may not be read
        return ""
    near = [path.parent / name / rest for name in nearest]
    near = [found for found in near if found.exists()] or [path.parent / name for name in nearest]
    return f"; did you mean {' or '.join(map(str, near))}?" if near else ""
