"""Read a dataclass's fields and a script's flags from source code, since importing transformers takes seconds."""

import ast
import builtins
import typing
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from ..runs import root
from ..runs.settings import setting


def field_names(path: str) -> set[str] | None:
    """Return the names of a dataclass's fields, inherited ones included; None if the class or a base is not found."""
    try:
        return _fields(*_split(path))
    except (LookupError, OSError, SyntaxError):
        return None


def parsed_names(module: str) -> set[str] | None:
    """
    Return the names of the fields of all dataclasses that a script passes to its `StrictTrlParser`.

    Return None if there is no such dataclass, or if one is not found.
    """
    found = [field_names(path) for path, _ in _given(module)]
    return None if None in found else set().union(*filter(None, found)) or None


def sketches(module: str) -> list[tuple[type, bool]] | None:
    """
    Return copies of the dataclasses that a script passes to its `StrictTrlParser`, with their fields and help alone.

    Each copy comes with a bool: whether the script passes the class by its name, such as "trl_ext.PPOConfig". A copy
    of a class that is passed by name has only the names of the fields that are inherited from TRL.

    Return None if a class is not found, or if the source of a field uses a name that its module defines.
    """
    try:
        return [(_sketch(*_split(path), is_named), is_named) for path, is_named in _given(module)] or None
    except (LookupError, OSError, SyntaxError, NameError, TypeError, AttributeError):
        return None


def _given(module: str) -> list[tuple[str, bool]]:
    """
    Return a pair for each dataclass that a script passes to its parser: its dotted path, and whether it is passed as a
    string.
    """
    calls = (node for node in ast.walk(_tree(module)) if isinstance(node, ast.Call))
    given = [call.args[0] for call in calls if ast.unparse(call.func) == "StrictTrlParser"]
    kinds = [kind for node in given[:1] for kind in (node.elts if isinstance(node, ast.Tuple) else [node])]
    return [
        (str(kind.value), True) if isinstance(kind, ast.Constant) else (f"{module}.{ast.unparse(kind)}", False)
        for kind in kinds
    ]


def option_names(module: str) -> set[str]:
    """Return the names of the flags that a module adds to an `argparse` parser."""
    calls = (node for node in ast.walk(_tree(module)) if isinstance(node, ast.Call))
    words = (arg for call in calls if ast.unparse(call.func).endswith("add_argument") for arg in call.args)
    flags = (str(word.value) for word in words if isinstance(word, ast.Constant))
    return {flag[2:].replace("-", "_") for flag in flags if flag.startswith("--")}


def docstring(module: str) -> str:
    """Return the docstring of a module."""
    return ast.get_docstring(_tree(module)) or ""


def _fields(module: str, name: str) -> set[str]:
    where, node = _class(module, name)
    names = {item.target.id for item in _annotated(node)}
    return names.union(*(_fields(*_base(where, ast.unparse(base))) for base in node.bases))


# What a field's source may name
_NAMESPACE = {**vars(builtins), **vars(typing), "field": field, "setting": setting}


@cache
def _sketch(module: str, name: str, is_named: bool) -> type:
    """
    Make a copy of a dataclass from its source. If `is_named`, fields that are inherited from TRL only get their names.
    """
    where, node = _class(module, name)
    bases = tuple(_sketch(*_base(where, ast.unparse(base)), is_named) for base in node.bases)
    is_read = not is_named or where.startswith("trl_ext.")
    space: dict[str, typing.Any] = {"__module__": where, "__annotations__": {}}
    for item in _annotated(node):
        space["__annotations__"][item.target.id] = _value(item.annotation) if is_read else typing.Any
        if not is_read or item.value is not None:
            space[item.target.id] = _value(item.value) if is_read else None
    return dataclass(kw_only=True)(type(name, bases, space))


def _value(node: ast.expr) -> typing.Any:
    """Evaluate an expression from a module's source, without importing the module."""
    return eval(compile(ast.Expression(node), "<fields>", "eval"), _NAMESPACE.copy())


def _class(module: str, name: str) -> tuple[str, ast.ClassDef]:
    """Return the module that defines a class, and the class's source. `module` defines the class or imports it."""
    tree = _tree(module)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
    for source in ast.walk(tree):  # lazy packages import within `if TYPE_CHECKING`
        if isinstance(source, ast.ImportFrom):
            for alias in source.names:
                if (alias.asname or alias.name) == name:
                    return _class(_absolute(module, source), alias.name)
    raise LookupError(f"{module} has no {name}")


def _annotated(node: ast.ClassDef) -> list[typing.Any]:
    """Return the fields that the source of a dataclass declares."""
    found = [item for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)]
    return [item for item in found if "ClassVar" not in ast.unparse(item.annotation)]


def _base(module: str, base: str) -> tuple[str, str]:
    """Return the module and the name of a base class, which is written as `base` in the source of `module`."""
    package, name = _split(base)
    for source in ast.walk(_tree(module)) if package else ():
        if isinstance(source, ast.ImportFrom) and package in (alias.name for alias in source.names):
            return f"{_absolute(module, source)}.{package}", name
    return package or module, name


def _split(path: str) -> tuple[str, str]:
    package, _, name = path.rpartition(".")
    return package, name


def _absolute(module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    is_package = _file(module).name == "__init__.py"
    parts = module.split(".")
    package = parts[: len(parts) + is_package - node.level]
    return ".".join([*package, *filter(None, [node.module])])


def _file(module: str) -> Path:
    if module.startswith("trl_ext.recipes."):  # a clone has them beside the package
        return root().joinpath(*module.split(".")[1:]).with_suffix(".py")
    package, *rest = module.split(".")
    spec = find_spec(package)  # of the package alone: find_spec imports the packages above a module
    if spec is None or spec.origin is None:
        raise LookupError(f"there is no module {package}")
    path = Path(spec.origin).parent.joinpath(*rest)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(_file(module).read_text(encoding="utf-8"))
