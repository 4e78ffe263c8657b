"""Set attributes for the duration of a block."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def temporarily(target: Any, **values: Any) -> Iterator[None]:
    """
    Give `target` these attributes within the block, and their old values back after it, whatever happens.

    What it did not have it loses again.
    """
    saved = {name: getattr(target, name) for name in values if hasattr(target, name)}
    vars(target).update(values)
    try:
        yield
    finally:
        for name in values.keys() - saved.keys():
            vars(target).pop(name, None)
        vars(target).update(saved)
