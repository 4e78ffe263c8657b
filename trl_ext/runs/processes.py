"""Share what the first process finds with all processes of a launch."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def from_first(value: T) -> T:
    """Return the first process's `value` on every process; all processes must call this."""
    from accelerate.utils import broadcast_object_list  # here: the command line checks a folder without it

    return broadcast_object_list([value])[0]


def on_first(function: Callable[..., T], *args: object) -> T:
    """Call a function on the first process alone; return its result, or raise its error, on every process."""
    from accelerate import PartialState

    found: tuple[T | None, Exception | None] = None, None
    if PartialState().is_main_process:
        try:
            found = function(*args), None
        except Exception as error:  # raised here alone, it would leave the others waiting
            found = None, error
    result, failure = from_first(found)
    if failure is not None:
        raise failure
    return result  # type: ignore[return-value]
