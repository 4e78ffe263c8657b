"""Two statements that Python lacks: refuse the first case that is wrong, and set attributes for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def refuse(*cases: tuple[Any, str]) -> None:
    """Raise a `ValueError` with the message of the first case `(is_wrong, message)` that is wrong."""
    for is_wrong, message in cases:
        if is_wrong:
            raise ValueError(message)


@contextmanager
def temporarily(target: Any, **values: Any) -> Iterator[None]:
    """
    Set attributes of `target` within the `with` block, and restore their old values after it, even after an error.

    An attribute that `target` itself did not have before, such as a method of its class, is deleted.
    """
    saved = {name: value for name, value in vars(target).items() if name in values}
    vars(target).update(values)
    try:
        yield
    finally:
        for name in values.keys() - saved.keys():
            vars(target).pop(name, None)
        vars(target).update(saved)
