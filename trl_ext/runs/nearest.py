"""Suggest the correct name for a mistyped name."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return `; did you mean A or B?` with the `names` that are most similar to `name`; "" if none is similar."""
    known = sorted(names)
    begun = [longer for longer in known if longer.startswith(name)]
    nearest = begun[:4] or difflib.get_close_matches(name, known)
    return f"; did you mean {' or '.join(nearest)}?" if nearest else ""
