"""Import a package's public names on first use, so that `import trl_ext` alone is fast."""

import ast
from collections.abc import Callable
from importlib import import_module
from importlib.util import resolve_name
from pathlib import Path
from typing import Any


def lazily(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """
    Return three values for a package, `__getattr__`, `__dir__` and `__all__`, made from its imports of names.

    These imports stand under `if TYPE_CHECKING:` in the package's file, where only type checkers and readers see them.
    At run time a name is imported when it is first used.

    Args:
        package: the package's `__name__`.
        file: the package's `__file__`.
    """
    block = next(node for node in ast.parse(Path(file).read_text(encoding="utf-8")).body if isinstance(node, ast.If))
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
