"""Find the files that ship with the package: recipes, accelerate's configurations and the runbook.

They are in the package if it was installed from a wheel, and beside the package in a clone. A name is searched first
in the working directory, then among these files, so a recipe runs from any folder.
"""

import difflib
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType

_PACKAGE = Path(__file__).parents[1]


def root() -> Path:
    """Return the folder that holds `recipes/`, `accelerate_configs/` and `docs/runbook.md`."""
    return _PACKAGE if (_PACKAGE / "recipes").is_dir() else _PACKAGE.parent


def find(name: str | os.PathLike[str]) -> Path:
    """
    Return the path of a file or folder: in the working directory or, if it is not there, among those that ship.

    The names of those that ship begin with `recipes/` or `accelerate_configs/`, as in `recipes/demo/world.py`. A name
    that is in neither place is returned unchanged, as a path.
    """
    path = Path(name).expanduser()
    is_ours = path.parts[:1] in (("recipes",), ("accelerate_configs",))
    if not path.exists() and is_ours and (root() / path).exists():
        return root() / path
    return path


def names(folder: str) -> list[str]:
    """List the names of the YAML files that ship in `recipes` or `accelerate_configs`, such as `tinystories/ppo`."""
    place = root() / folder
    return sorted(path.relative_to(place).with_suffix("").as_posix() for path in place.rglob("*.yaml"))


def config_file(flag: str, name: str, folder: str = "recipes") -> Path:
    """
    Return the YAML file that a flag names: a path, or the name of one that ships, such as `tinystories/ppo`.

    Args:
        flag: name of the flag, for error messages.
        name: name of the file, with or without the folder before it and `.yaml` after it.
        folder: `"recipes"` or `"accelerate_configs"`.

    Raises:
        FileNotFoundError: there is no such file; the message has the nearest names.
    """
    if Path(name).expanduser().is_file():
        return Path(name).expanduser()
    short = name.removeprefix(f"{folder}/").removesuffix(".yaml")
    if (path := root() / folder / f"{short}.yaml").is_file():
        return path
    nearest = did_you_mean(short, names(folder))
    raise FileNotFoundError(f"{flag} {name}: there is no such file{nearest}; the working directory is {Path.cwd()}")


def accelerate_file(flag: str, name: str) -> Path:
    """
    Return accelerate's configuration file that a flag names: a path, or the name of a file in trl_ext or TRL.

    Raises:
        FileNotFoundError: there is no such file.
    """
    try:
        return config_file(flag, name, "accelerate_configs")
    except FileNotFoundError:
        from ..upstream.names import resolve_accelerate_config_argument  # imports TRL

        with suppress(ValueError):
            return Path(resolve_accelerate_config_argument(["--accelerate_config", name])[1])
        raise


def recipe(name: str) -> ModuleType:
    """Import a recipe as the module `trl_ext.recipes.NAME`, wherever its folder lies, and return it."""
    package = f"{_PACKAGE.name}.recipes"
    if package not in sys.modules:
        spec = ModuleSpec(package, None, is_package=True)
        spec.submodule_search_locations = [str(root() / "recipes")]
        sys.modules[package] = module_from_spec(spec)
    return import_module(f"{package}.{name}")


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return `; did you mean A or B?` with the `names` that begin with `name`, or else are similar; "" if none is."""
    known = sorted(names)
    begun = [longer for longer in known if longer.startswith(name)]
    nearest = begun[:4] or difflib.get_close_matches(name, known)
    return f"; did you mean {' or '.join(nearest)}?" if nearest else ""
