"""What somebody who mistyped a name may have meant."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of an error message: `; did you mean A or B?` with the nearest of `names`, nothing if none is near."""
    nearest = difflib.get_close_matches(name, sorted(names))
    return f"; did you mean {' or '.join(nearest)}?" if nearest else ""
