"""What has moved since 0.2.0: old names can be imported until 0.4.0, and tell what is the same for good."""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

# Dotted name at 0.2.0 → name now: of a module, of a package with all that is in it, or of one class or function that
# its module's other contents did not go with. Where two modules became one, the first entry gives what is in it its
# name of 0.2.0, so that the others need one for each of their classes and functions; a module that others joined
# without moving itself comes before them, as itself.
MOVED: dict[str, str] = {}
# Class or function, by its name at 0.2.0 → how often its settings have come to mean something else. Count it up where
# the same settings give other scores or batches: runs and caches of before are then told apart.
MEANING: dict[str, int] = {}


def new_name(name: str) -> str:
    """Return what a dotted name of 0.2.0 is called now."""
    return _renamed(name, MOVED)


def identity_name(module: str, qualname: str) -> tuple[str, str]:
    """
    Return by which module and name checkpoints and caches tell a class or function: its own, of ours those of 0.2.0.

    Behind the name of one whose settings have another meaning by now stands a number.
    """
    if module.partition(".")[0] != __package__:
        return module, qualname
    old_names = {new: old for old, new in reversed(MOVED.items())}  # of several, the first one counts
    name = _renamed(f"{module}.{qualname}", old_names)
    module, *parts = name.rsplit(".", qualname.count(".") + 1)
    return module, ".".join(parts) + (f" {MEANING[name]}" if name in MEANING else "")


def _renamed(name: str, names: dict[str, str]) -> str:
    """Replace the longest beginning of a dotted name that is among the names."""
    parts = name.split(".")
    beginnings = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    known = next((beginning for beginning in beginnings if beginning in names), None)
    return name if known is None else names[known] + name.removeprefix(known)


class OldNames(MetaPathFinder, Loader):
    """
    Imports modules by their old names, with a warning that says the new one.

    What is imported is the module of the new name itself, so that its classes are the same by both. Of a module whose
    contents went to several places it is one that looks them up there.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_old = name.partition(".")[0] == __package__ and new_name(name) != name
        return spec_from_loader(name, self, is_package=True) if is_old else None

    def exec_module(self, module: ModuleType) -> None:
        old, new = module.__name__, new_name(module.__name__)
        try:
            found = import_module(new)
        except ModuleNotFoundError as error:
            if error.name != new:
                raise
            raise ModuleNotFoundError(f"No module named {old!r}: it would now be {new!r}", name=old) from None
        elsewhere = {
            name.removeprefix(f"{old}."): to.rpartition(".")
            for name, to in MOVED.items()
            if name.rpartition(".")[0] == old and to != f"{new}.{name.removeprefix(f'{old}.')}"
        }

        def part(name: str) -> Any:
            place, _, name_there = elsewhere.get(name, (new, ".", name))
            return getattr(import_module(place), name_there)

        if elsewhere:
            module.__getattr__ = part  # type: ignore[method-assign]
        else:
            sys.modules[old] = found  # which `import` then takes
        warnings.warn(f"{old} is now {new}; the old name goes in 0.4.0", FutureWarning, stacklevel=2)
