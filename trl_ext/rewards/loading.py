"""Reward functions by name, for recipes and configuration files."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from ..shipped import find


def load_reward(path: str) -> Callable:
    """
    Import a reward function from `path/to/file.py:function` or `package.module.function`. Paths are relative to the
    working directory, or name what ships: `recipes/demo/world.py`. Of a package that is not installed, the module is
    looked for as a file, too.

    Raises:
        ImportError: no such file, module or function.
        ValueError: what is named is a class, or cannot be called.
    """
    place, _, name = path.rpartition(":" if ".py:" in path else ".")
    try:
        if not (place and name):
            raise ImportError("no module or no function is named")
        function = getattr(_module(place), name)
    except (ImportError, OSError, AttributeError) as error:
        raise ImportError(
            f"reward function {path!r} cannot be imported: {error}. Tried {name!r} of {place!r} from {Path.cwd()}; "
            "write `path/to/file.py:function`, or `package.module.function` of an installed package."
        ) from error
    if isinstance(function, type) or not callable(function):
        raise ValueError(
            f"reward function {path!r} is of type {type(function).__name__}; name a function or an instance"
        )
    return function


def _module(place: str) -> ModuleType:
    if place.endswith(".py"):
        return _module_of_file(find(place))
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError:
        file = find(Path(*place.split(".")).with_suffix(".py"))
        if not file.is_file():
            raise
        return _module_of_file(file)


def _module_of_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"reward_file_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up
    spec.loader.exec_module(module)
    return module
