"""Identify functions by their source, so that a resumed run notices a changed reward function."""

import ast
import functools
import inspect
import os
import re
import sys
import sysconfig
import textwrap
from collections import deque
from collections.abc import Iterator
from datetime import date, time, timedelta
from enum import Enum
from numbers import Number
from operator import attrgetter, itemgetter, methodcaller
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import xxhash
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ..models.identity import hash_of, tokenizer_identity

_INSTALLED = (
    *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    str(Path(__file__).parents[1]) + os.sep,  # this package, also where it is installed as editable
)
_SHOWN = (  # types whose `repr` tells all
    *(type(None), str, bytes, bytearray, range, Path, Number, date, time, timedelta),
    *(attrgetter, itemgetter, methodcaller),
)
Seen = dict[int, tuple[Any, str]]


def source_identity(function: Any) -> str:
    """
    Identify a function or a callable object by a hash.

    The hash covers:

    - the source of the function, without comments
    - the values that the function closes over
    - the attributes of a callable object: the public ones, and `_x` if `x` is an argument of `__init__`
    - the functions, classes, objects, models and plain values of the user's own files that it names, and what these
      name in turn

    Anything from an installed package or from trl_ext counts by its name. Any other object, such as a connection,
    counts by its type. Imports within a function's body do not count.

    A function with an attribute `identity`, a string, is identified by that alone: `my_reward.identity = "2"`. This
    holds for a function within another one, too.

    Returns:
        The attribute `identity`, or the hash, as `xxh3:…`
    """
    identity = getattr(function, "identity", None)
    return identity if isinstance(identity, str) else f"xxh3:{_digest(function, {})[:12]}"


def _digest(value: Any, seen: Seen) -> str:
    if id(value) not in seen:
        seen[id(value)] = value, "what holds this"  # `value` is kept, so that no other object takes its id
        digest = xxhash.xxh3_128()
        for part in _parts(value, seen):
            digest.update(f"{part}\n".encode("utf-8", "surrogatepass"))
        seen[id(value)] = value, digest.hexdigest()
    return seen[id(value)][1]


def _parts(value: Any, seen: Seen) -> Iterator[str]:
    inner: list[Any] = []
    if callable(value) and isinstance(identity := getattr(value, "identity", None), str):  # a reward in another one
        yield identity
    elif isinstance(value, Enum):
        inner = [type(value), value.name, value.value]
    elif isinstance(value, _SHOWN):
        yield repr(value)
    elif isinstance(value, (list, tuple, deque)):
        yield type(value).__name__
        inner = list(value)
    elif isinstance(value, (set, frozenset)):
        yield from sorted(_digest(item, seen) for item in value)
    elif isinstance(value, dict):
        inner = [part for item in value.items() for part in item] + [getattr(value, "default_factory", None)]
    elif isinstance(value, re.Pattern):
        inner = [value.pattern, value.flags]  # `repr` cuts a long one
    elif isinstance(value, np.ndarray):
        inner = [str(value.dtype), value.shape, value.tolist() if value.dtype.hasobject else value.tobytes()]
    elif isinstance(value, Tensor):
        yield hash_of({"": value})
    elif isinstance(value, nn.Module):
        yield hash_of(value.state_dict(keep_vars=True))
        for module in value.modules():
            yield from _object(module, seen, is_told=not _is_installed(type(module)))
    elif isinstance(value, PreTrainedTokenizerBase):
        yield str(tokenizer_identity(value))
    elif isinstance(value, functools.partial):
        inner = [value.func, value.args, value.keywords]
    elif isinstance(value, CodeType):
        inner = [value.co_code, value.co_names, value.co_consts]
    elif inspect.ismethod(value):
        inner = [value.__func__, value.__self__]
    elif inspect.isbuiltin(value):
        inner = [value.__name__, value.__module__ if inspect.ismodule(value.__self__) else value.__self__]
    elif inspect.isclass(value):
        yield from _class(value, seen)
    elif inspect.isfunction(value):
        yield from _function(value, seen)
    else:
        is_told = callable(value) or hasattr(value, "__dataclass_fields__") or isinstance(value, SimpleNamespace)
        yield from _object(value, seen, is_told or not _is_installed(type(value)))
    for item in inner:
        yield _digest(item, seen)


def _object(value: Any, seen: Seen, is_told: bool) -> Iterator[str]:
    """Yield what identifies an object: its type and, if `is_told`, its attributes."""
    yield _digest(type(value), seen)
    yield str(getattr(value, "__name__", ""))
    if hasattr(value, "__wrapped__"):  # a function with a cache
        yield _digest(value.__wrapped__, seen)
    if is_told:
        start = type(value).__init__
        given = inspect.signature(start).parameters if inspect.isfunction(start) else ()
        slots = [name for base in type(value).__mro__ for name in vars(base).get("__slots__", ())]
        attributes = {name: getattr(value, name) for name in slots if hasattr(value, name)}
        attributes |= getattr(value, "__dict__", {})
        attributes.pop("training", None)  # of a model: whether it is used right now
        counted = [name for name in attributes if not name.startswith("_") or name[1:] in given]
        yield _digest({name: attributes[name] for name in counted}, seen)


def _class(value: type, seen: Seen) -> Iterator[str]:
    if _is_installed(value):
        yield f"{value.__module__}.{value.__qualname__}"
        return
    yield value.__qualname__
    attributes = {name: _function_of(item) for name, item in vars(value).items() if not name.startswith("__")}
    attributes |= {name: item for name, item in vars(value).items() if inspect.isfunction(item)}
    yield _digest([value.__bases__, attributes], seen)


def _function(value: Any, seen: Seen) -> Iterator[str]:
    """Yield what identifies a function: its name, its source, and the values of the names in the source."""
    if hasattr(value, "__wrapped__"):
        yield _digest(value.__wrapped__, seen)
    yield value.__qualname__
    if _is_in_a_package(value.__code__.co_filename):  # not by its module, which a decorator takes from what it wraps
        return
    yield _source(value) or _digest(value.__code__, seen)
    named = dict(_named(value.__globals__, sorted(_names(value.__code__)), []))
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        named[name] = cell.cell_contents
    yield _digest([value.__defaults__, value.__kwdefaults__, named], seen)


def _named(namespace: dict[str, Any], names: list[str], modules: list[ModuleType]) -> Iterator[tuple[str, Any]]:
    """
    Yield each of these names that a namespace has, with its value.

    In place of a module of the user's own files, yield the names that the module has, each as `module.name`. `modules`
    lists the modules that were visited before.
    """
    for name in names:
        item = namespace.get(name)
        if not inspect.ismodule(item):
            if name in namespace:
                yield name, item
        elif item not in modules and not _is_in_a_package(getattr(item, "__file__", None)):
            modules.append(item)  # they may name one another
            yield from ((f"{name}.{inner}", found) for inner, found in _named(vars(item), names, modules))


def _names(code: CodeType) -> set[str]:
    """Return the names of all globals and attributes in a function, and in functions and comprehensions within it."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


def _function_of(attribute: Any) -> Any:
    """Return the function in a static method, a class method or a (cached) property; another attribute unchanged."""
    found = (getattr(attribute, name, None) for name in ("__func__", "fget", "func"))
    return next(filter(None, found), attribute)


def _is_installed(value: Any) -> bool:
    module = sys.modules.get(value.__module__)
    if module is None or value.__module__ == "__main__":
        return False
    return _is_in_a_package(getattr(module, "__file__", None))


def _is_in_a_package(file: str | None) -> bool:
    """Return whether a file is part of an installed package; so is built-in code, whose file is None."""
    if file is None or file.startswith("<frozen"):
        return True
    return file.startswith(_INSTALLED) or not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _source(function: Any) -> str | None:
    """
    Return a function's source without comments; None if it was typed into a shell, which keeps no source.

    Return None for a lambda, too: the line that it stands in has other code.
    """
    if function.__name__ == "<lambda>":
        return None
    try:
        return ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(function.__code__))))
    except (OSError, SyntaxError):
        return None
