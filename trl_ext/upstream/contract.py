"""Compare functions, methods and attributes of a library with what we wrote down of them."""

import dis
import inspect
from collections.abc import Iterable
from importlib import import_module
from inspect import Parameter
from itertools import pairwise
from typing import Any


def find(path: str) -> Any:
    """Return what is at `package.module.name`; raise an `ImportError` that says so if it is gone."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        why = f" ({error})" if isinstance(error, ImportError) else ""
        raise ImportError(f"`{path}` is gone{why}") from error


def function_change(path: str, passed: str | None) -> str:
    """
    Say what changed about a function or class, so that our call would fail; an empty text if nothing did.

    Args:
        path: where it is.
        passed: the parameters that we pass, as "model, seed=" if the first by its place and the second by name; None
            if we do not call it. Others may be there if they have a default.
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
    """Say the same of a method of `cls`. Other parameters may be there only if `passed` ends in "..."."""
    if not callable(method := getattr(cls, name, None)):
        return f"`{cls.__name__}` has no method `{name}`"
    parameters = list(inspect.signature(method).parameters)[1:]  # all but `self`
    return _difference(f"{cls.__name__}.{name}", parameters, [] if "..." in passed else parameters, passed)


def attribute_changes(cls: type, names: list[str]) -> dict[str, str]:
    """Say of each name that is neither a member of `cls` nor set by a method of it that it is gone."""
    present = {*dir(cls), *assigned(cls.__mro__)}
    return {name: "" if name in present else f"`{cls.__name__}` has no `{name}`" for name in names}


def names_of_both(ours: Iterable[type], theirs: Iterable[type]) -> set[str]:
    """Return what both lists of classes define, as a member or by setting it; `__names__` apart."""
    ours_and_theirs = [
        {name for cls in classes for name in vars(cls) if not name.startswith("__")} | assigned(classes)
        for classes in (ours, theirs)
    ]
    return set.intersection(*ours_and_theirs)


def assigned(classes: Iterable[type]) -> set[str]:
    """Return what the methods of these classes assign to `self`; read from bytecode, so it needs no instance."""
    names = set()
    for member in (member for cls in classes for member in vars(cls).values()):
        function = inspect.unwrap(getattr(member, "fget", member))
        if inspect.isfunction(function):
            steps = [step for step in dis.get_instructions(function) if step.opname != "EXTENDED_ARG"]
            for before, step in pairwise(steps):
                # Since Python 3.13 one step may load two variables, "value, self"
                if step.opname == "STORE_ATTR" and before.argrepr.split(", ")[-1] == "self":
                    names.add(step.argval)
    return names


def _difference(label: str, parameters: Iterable[str], required: list[str], passed: str) -> str:
    """Check that `required` is passed, that what is passed exists, and by its place under the name that it had."""
    given = [name for name in passed.split(", ") if name not in ("", "...")]
    by_place = [name for name in given if not name.endswith("=")]
    names, parameters = {name.rstrip("=") for name in given}, list(parameters)
    if parameters[: len(by_place)] == by_place and {*required} <= names <= {*parameters}:
        return ""
    return f"`{label}` takes ({', '.join(parameters)}), we rely on ({passed})"


_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
