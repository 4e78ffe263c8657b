"""Make monitors from their names in recipes and configuration files."""

import ast
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from transformers import EarlyStoppingCallback, TrainerCallback

from ..runs.nearest import did_you_mean
from ..runs.needs import check_monitors
from .canary import CanaryCallback
from .hack_watch import HackWatch


def load_monitors(entries: Sequence[str] | None) -> list[TrainerCallback]:
    """
    Make callbacks from the entries of a configuration file.

    >>> load_monitors(["LengthDriftCallback", "KLBudgetCallback(limit=5, action='stop')"])[1].limit
    5

    Raises:
        ValueError: an entry has an unknown class or argument, or a value that the class refuses. For an unknown name
            the message has the nearest ones.
    """
    import trl_ext.callbacks as package

    known: dict[str, Any] = {
        name: getattr(package, name) for name in package.__all__ if name.endswith(("Callback", "Watch"))
    }
    for name in ("MonitorCallback", "SamplesCallback", "AnswersCallback"):  # a base class, and what recipes add
        del known[name]
    known["EarlyStoppingCallback"] = EarlyStoppingCallback
    return [_load(entry, known) for entry in entries or []]


def attach_monitors(trainer: Any, monitors: Sequence[TrainerCallback]) -> None:
    """
    Add monitors to a trainer, and warn of those that will have nothing to watch.

    The attribute `trainer` is set in a `CanaryCallback`, which generates, and in a `HackWatch` if the trainer keeps a
    table of completions.
    """
    for monitor in monitors:
        if isinstance(monitor, CanaryCallback) or (isinstance(monitor, HackWatch) and hasattr(trainer, "_logs")):
            monitor.trainer = trainer
        trainer.add_callback(monitor)
    check_monitors(trainer)


def _load(entry: str, known: dict[str, Any]) -> TrainerCallback:
    try:
        node = ast.parse(entry.strip(), mode="eval").body
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        if not isinstance(call.func, ast.Name) or call.args or not all(word.arg for word in call.keywords):
            raise SyntaxError
        arguments = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError):
        raise ValueError(
            f"monitor {entry!r} cannot be read: write `Name` or `Name(argument=value, …)`, values as in Python"
        ) from None
    name = call.func.id
    if name not in known:
        nearest = did_you_mean(name, known) or f"; there are {', '.join(sorted(known))}"
        raise ValueError(f"unknown monitor {name!r}{nearest}")
    cls = known[name]
    if cls is not EarlyStoppingCallback:
        names = [field.name for field in fields(cls) if field.init]
        for argument in arguments:
            if argument not in names:
                nearest = did_you_mean(argument, names) or f"; it has {', '.join(names)}"
                raise ValueError(f"{name} has no argument {argument!r}{nearest}")
    try:
        return cls(**arguments)
    except (TypeError, ValueError, ImportError) as error:
        raise ValueError(f"monitor {entry!r}: {error}") from error
