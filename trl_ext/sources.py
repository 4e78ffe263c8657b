"""Which function this is: by its source, for resuming."""

import ast
import functools
import inspect
import re
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def source_identity(function: Any) -> str:
    """
    Say which function, or callable object, this is.

    Counted are its source without comments, the values that it closes over, its public attributes, and the functions,
    classes and plain values of its own files that it names, and theirs. What comes from an installed package counts by
    name. What is no plain value, as a model or a connection, counts by its type.

    A function says by itself which it is with an attribute `identity`, a string: `my_reward.identity = "2"`.

    Returns:
        The attribute `identity`, or `xxh3:…`
    """
    identity = getattr(function, "identity", None)
    if isinstance(identity, str):
        return identity
    digest = xxhash.xxh3_128()
    for part in _parts(function, set()):
        digest.update(f"{part}\n".encode("utf-8", "surrogatepass"))
    return f"xxh3:{digest.hexdigest()[:12]}"


def _parts(value: Any, seen: set[int]) -> Iterator[str]:
    if id(value) in seen:
        return
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, range, Path)):
        yield repr(value)
        return
    seen.add(id(value))
    if isinstance(value, (list, tuple)):
        yield f"{type(value).__name__} of {len(value)}"
        for item in value:
            yield from _parts(item, seen)
    elif isinstance(value, (set, frozenset)):
        yield from sorted(repr(item) for item in value)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield repr(key)
            yield from _parts(item, seen)
    elif isinstance(value, re.Pattern):
        yield repr(value)
    elif isinstance(value, functools.partial):
        yield from _parts([value.func, value.args, value.keywords], seen)
    elif inspect.ismethod(value):
        yield from _parts([value.__func__, value.__self__], seen)
    elif inspect.isfunction(value) or inspect.isclass(value):
        yield from _code(value, seen)
    elif callable(value) or hasattr(value, "__dataclass_fields__"):
        yield from _parts(type(value), seen)
        public = {name: item for name, item in getattr(value, "__dict__", {}).items() if not name.startswith("_")}
        yield from _parts(public, seen)
    else:
        yield type(value).__qualname__


def _code(value: Any, seen: set[int]) -> Iterator[str]:
    """Of a function or class: its source, and what it names."""
    value = inspect.unwrap(value)
    yield f"{value.__module__}.{value.__qualname__}" if _is_installed(value) else value.__qualname__
    if _is_installed(value):
        return
    yield _source(value)
    if inspect.isclass(value):
        for base in value.__mro__[1:-1]:
            yield from _parts(base, seen)
        functions = [inspect.unwrap(f) for f in map(_function_of, vars(value).values()) if inspect.isfunction(f)]
    else:
        yield from _parts([value.__defaults__, value.__kwdefaults__], seen)
        functions = [value]
    for function in functions:
        named = inspect.getclosurevars(function)
        for name, item in sorted({**named.globals, **named.nonlocals}.items()):
            if not inspect.ismodule(item):
                yield name
                yield from _parts(item, seen)


def _function_of(attribute: Any) -> Any:
    """The function in a static, class or cached method, or in a property."""
    return getattr(attribute, "__func__", None) or getattr(attribute, "fget", None) or attribute


def _is_installed(value: Any) -> bool:
    try:
        return inspect.getfile(value).startswith(_INSTALLED)
    except (TypeError, OSError):  # built in, or typed in
        return inspect.isclass(value)


def _source(value: Any) -> str:
    try:
        source = textwrap.dedent(inspect.getsource(value))
    except (OSError, TypeError):  # typed in
        code = getattr(value, "__code__", None)
        return "" if code is None else repr((code.co_code, code.co_consts, code.co_names))
    try:
        return ast.unparse(ast.parse(source))
    except SyntaxError:  # a lambda in the midst of a call
        return source
