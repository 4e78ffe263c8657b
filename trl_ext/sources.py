"""Which function this is: by its source, for resuming."""

import ast
import functools
import inspect
import re
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import xxhash
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from .models.identity import hash_of, tokenizer_identity

_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def source_identity(function: Any) -> str:
    """
    Say which function, or callable object, this is.

    Counted are its source without comments, the values that it closes over, its public attributes, and the functions,
    classes, models and plain values of its own files that it names, and theirs. What comes from an installed package
    counts by name, and what is none of these, as a connection, by its type.

    A function says by itself which it is with an attribute `identity`, a string: `my_reward.identity = "2"`.

    Returns:
        The attribute `identity`, or `xxh3:…`
    """
    identity = getattr(function, "identity", None)
    if isinstance(identity, str):
        return identity
    digest = xxhash.xxh3_128()
    for part in _parts(function, {}):
        digest.update(f"{part}\n".encode("utf-8", "surrogatepass"))
    return f"xxh3:{digest.hexdigest()[:12]}"


def _parts(value: Any, seen: dict[int, Any]) -> Iterator[str]:
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, range, Path)):
        yield repr(value)
        return
    if id(value) in seen:
        yield f"again {list(seen).index(id(value))}"
        return
    seen[id(value)] = value  # kept, so that no other object takes its id
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        yield f"{type(value).__name__} of {len(value)}"
    if isinstance(value, (list, tuple)):
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
    elif isinstance(value, (nn.Module, Tensor)):
        yield hash_of(value.state_dict(keep_vars=True) if isinstance(value, nn.Module) else {"": value})
    elif isinstance(value, PreTrainedTokenizerBase):
        yield str(tokenizer_identity(value))
    elif isinstance(value, functools.partial):
        yield from _parts([value.func, value.args, value.keywords], seen)
    elif inspect.ismethod(value):
        yield from _parts([value.__func__, value.__self__], seen)
    elif inspect.isfunction(value) or inspect.isclass(value):
        yield from _code(value, seen)
    elif callable(value) or hasattr(value, "__dataclass_fields__"):
        yield from _parts(type(value), seen)
        attributes = getattr(value, "__dict__", {})
        public = {name: item for name, item in attributes.items() if not name.startswith("_")}
        yield from _parts([public, attributes.get("__wrapped__")], seen)  # `lru_cache` wraps a function
    else:
        yield type(value).__qualname__


def _code(value: Any, seen: dict[int, Any]) -> Iterator[str]:
    """Of a function or class: its source, and what it names."""
    if _is_installed(value):
        yield f"{value.__module__}.{value.__qualname__}"
        return
    if inspect.isclass(value):
        yield from _parts(list(value.__bases__), seen)
        attributes = {name: _function_of(item) for name, item in vars(value).items() if not name.startswith("__")}
        attributes |= {name: item for name, item in vars(value).items() if inspect.isfunction(item)}
        yield from _parts(attributes, seen)
        return
    yield _source(value)
    yield from _parts([value.__defaults__, value.__kwdefaults__], seen)
    closed_over = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    named = {name: value.__globals__[name] for name in _names(value.__code__) & value.__globals__.keys()}
    named |= {name: cell.cell_contents for name, cell in closed_over}
    yield from _parts({name: item for name, item in sorted(named.items()) if not inspect.ismodule(item)}, seen)


def _names(code: CodeType) -> set[str]:
    """All names of globals and attributes in a function, and in the functions and comprehensions within."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


def _function_of(attribute: Any) -> Any:
    """The function in a static or class method, or in a property, also a cached one."""
    if isinstance(attribute, functools.cached_property):
        return attribute.func
    return getattr(attribute, "__func__", None) or getattr(attribute, "fget", None) or attribute


def _is_installed(value: Any) -> bool:
    module = sys.modules.get(value.__module__)
    if module is None or value.__module__ == "__main__":
        return False
    return str(getattr(module, "__file__", None) or _INSTALLED[0]).startswith(_INSTALLED)  # built in: no file


def _source(function: Any) -> str:
    try:
        source = textwrap.dedent(inspect.getsource(function.__code__))  # of a function that wraps another, its own
    except OSError:  # typed in
        code = function.__code__
        return repr((code.co_code, code.co_consts, code.co_names))
    try:
        return ast.unparse(ast.parse(source))
    except SyntaxError:  # a lambda in the midst of a call
        return source
