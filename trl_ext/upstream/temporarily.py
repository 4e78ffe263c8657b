"""Set attributes for the duration of a block."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def temporarily(target: Any, **values: Any) -> Iterator[None]:
    """
    Set attributes of `target` within the block, and restore their old values after it, even after an error.

    An attribute that `target` did not have before is deleted.
    """
    saved = {name: getattr(target, name) for name in values if hasattr(target, name)}
    vars(target).update(values)
    try:
        yield
    finally:
        for name in values.keys() - saved.keys():
            vars(target).pop(name, None)
        vars(target).update(saved)
