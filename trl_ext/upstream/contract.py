"""Check that a library still has the functions, methods and attributes that trl_ext relies on."""

import dis
import functools
import inspect
from collections.abc import Callable, Iterable
from importlib import import_module
from inspect import Parameter
from itertools import pairwise
from typing import Any


def find(path: str) -> Any:
    """Return the object at `package.module.name`; raise an `ImportError` if it no longer exists."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        why = f" ({error})" if isinstance(error, ImportError) else ""
        raise ImportError(f"`{path}` is gone{why}") from error


def function_change(path: str, passed: str | None) -> str:
    """
    Return a sentence on the change in a function or class that would make trl_ext's call fail; "" if there is none.

    Args:
        path: dotted name of the function or class.
        passed: the parameters that trl_ext passes. "model, seed=" stands for `model` by position and `seed` by name.
            Further parameters with a default are no change. None if trl_ext does not call the function.
    """
    try:
        function = find(path)
    except ImportError as error:
        return str(error)
    if passed is None:
        return ""
    parameters = inspect.signature(function).parameters
    required = [name for name, p in parameters.items() if p.default is Parameter.empty and p.kind not in _VARIADIC]
    return _difference(path.rpartition(".")[2], parameters, required, passed)


def method_change(cls: type, name: str, passed: str) -> str:
    """
    Return a sentence on how a method of `cls` differs from the method that trl_ext was written for; "" if it does not.

    `passed` lists the parameters that trl_ext passes: "model, seed=" stands for `model` by position and `seed` by
    name. A further parameter counts as a difference, unless `passed` ends in `...`.
    """
    if not callable(method := getattr(cls, name, None)):
        return f"`{cls.__name__}` has no method `{name}`"
    parameters = list(inspect.signature(method).parameters)[1:]  # all but `self`
    return _difference(f"{cls.__name__}.{name}", parameters, [] if "..." in passed else parameters, passed)


def attribute_changes(cls: type, names: list[str]) -> dict[str, str]:
    """
    Map each name to "" if `cls` still has the attribute of this name, else to a sentence that says it is gone.

    A class has an attribute if the class defines it, or if one of the class's methods sets it.
    """
    present = {*dir(cls), *assigned(cls.__mro__)}
    return {name: "" if name in present else f"`{cls.__name__}` has no `{name}`" for name in names}


def names_of_both(ours: Iterable[type], theirs: Iterable[type]) -> set[str]:
    """
    Return the names that `ours` and `theirs` have in common.

    A list of classes has a name if one of its classes defines it (names that begin with `__` do not count), or if a
    method of one of them assigns it to `self`.
    """
    ours_and_theirs = [
        {name for cls in classes for name in vars(cls) if not name.startswith("__")} | assigned(classes)
        for classes in (ours, theirs)
    ]
    return set.intersection(*ours_and_theirs)


def assigned(classes: Iterable[type]) -> set[str]:
    """Return the attributes of `self` that methods of these classes assign, as read from the methods' bytecode."""
    members = (inspect.unwrap(getattr(each, "fget", each)) for cls in classes for each in vars(cls).values())
    return {name for member in members if inspect.isfunction(member) for name in _assigned_by(member)}


@functools.cache  # reading bytecode takes long, and most classes are asked about twice
def _assigned_by(function: Callable) -> set[str]:
    """Return the attributes of `self` that a function assigns."""
    # EXTENDED_ARG only widens the argument of the step after it
    steps = [step for step in dis.get_instructions(function) if step.opname != "EXTENDED_ARG"]
    # Since Python 3.13 one step may load two variables, "value, self"
    return {
        step.argval
        for before, step in pairwise(steps)
        if step.opname == "STORE_ATTR" and before.argrepr.split(", ")[-1] == "self"
    }


def _difference(label: str, parameters: Iterable[str], required: list[str], passed: str) -> str:
    """Return a sentence on `label`, a function whose parameters do not fit what trl_ext passes; "" if they fit."""
    given = [name for name in passed.split(", ") if name not in ("", "...")]
    by_place = [name for name in given if not name.endswith("=")]
    names = {name.rstrip("=") for name in given}
    parameters = list(parameters)
    # In their places, none that is required left out, none that is unknown
    if parameters[: len(by_place)] == by_place and {*required} <= names <= {*parameters}:
        return ""
    return f"`{label}` takes ({', '.join(parameters)}), but trl_ext relies on ({passed})"


_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
