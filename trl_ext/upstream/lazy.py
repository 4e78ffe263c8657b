"""Import a package's public names on first use, so that `import trl_ext` alone is fast."""

import ast
from collections.abc import Callable
from importlib import import_module
from importlib.util import resolve_name
from pathlib import Path
from typing import Any


def lazily(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """
    Return `__getattr__`, `__dir__` and `__all__` of a package, so that its public names are imported on first use.

    The names are read from the imports under `if TYPE_CHECKING:` in the package's file, which do not run.

    Args:
        package: the package's `__name__`.
        file: the package's `__file__`.
    """
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    places = {
        alias.asname or alias.name: (resolve_name("." * node.level + (node.module or ""), package), alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    names = sorted(places)

    def load(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; its names are {', '.join(names)}")
        module, attribute = places[name]
        return import_module(f"{package}.{name}") if module == package else getattr(import_module(module), attribute)

    return load, lambda: names, names
