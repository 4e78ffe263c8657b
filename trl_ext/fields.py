"""The fields of a dataclass, and a script's flags, read from their source: to import transformers takes seconds."""

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from .shipped import root


def field_names(path: str) -> set[str] | None:
    """Return the fields of the dataclass `package.module.Name`, also inherited ones; None if a class is not found."""
    module, _, name = path.rpartition(".")
    try:
        return _fields(module, name)
    except (LookupError, OSError, SyntaxError):
        return None


def parsed_names(module: str) -> set[str] | None:
    """Return the fields of all dataclasses that a script gives its `StrictTrlParser`; None if one is not found."""
    calls = (node for node in ast.walk(_tree(module)) if isinstance(node, ast.Call))
    given = [call.args[0] for call in calls if ast.unparse(call.func) == "StrictTrlParser"]
    kinds = [kind for node in given[:1] for kind in (node.elts if isinstance(node, ast.Tuple) else [node])]
    paths = [kind.value if isinstance(kind, ast.Constant) else f"{module}.{ast.unparse(kind)}" for kind in kinds]
    found = [field_names(str(path)) for path in paths]
    return None if None in found else set().union(*filter(None, found)) or None


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
    tree = _tree(module)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            names = {
                item.target.id
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
                if "ClassVar" not in ast.unparse(item.annotation)
            }
            return names.union(*(_inherited(module, ast.unparse(base)) for base in node.bases))
    for source in ast.walk(tree):  # lazy packages import within `if TYPE_CHECKING`
        if isinstance(source, ast.ImportFrom):
            for alias in source.names:
                if (alias.asname or alias.name) == name:
                    return _fields(_absolute(module, source), alias.name)
    raise LookupError(f"{module} has no {name}")


def _inherited(module: str, base: str) -> set[str]:
    package, _, name = base.rpartition(".")  # `trl.DPOConfig` where two have one name
    return _fields(package or module, name)


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
