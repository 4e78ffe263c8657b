"""Does the installed TRL still have what trl_ext relies on? Prints each item, and exits 1 if one has changed.

python -m trl_ext.commands.contract
"""

import sys
from importlib import import_module
from importlib.metadata import version

from ..contract import function_change
from ..upstream import ATTRIBUTES, METHODS, NAMES, TESTED, changes_of_class, names_taken


def changes() -> dict[str, str]:
    """What changed of each item of the tables; empty if nothing did."""
    found = {
        f"{module}.{name}": function_change(f"{module}.{name}", passed)
        for module, names in NAMES.items()
        for name, passed in names.items()
    }
    for path in METHODS | ATTRIBUTES:
        found |= changes_of_class(path)
    for trainer in ("PPOTrainer", "DPOTrainer"):
        try:
            found[f"names that trl_ext.{trainer} has for itself"] = names_taken(
                getattr(import_module("trl_ext"), trainer)
            )
        except ImportError as error:
            found[f"import trl_ext.{trainer}"] = str(error)
    return found


def main() -> None:
    for package, tested in TESTED.items():
        print(f"{package} {version(package)}, tested with {tested}")
    found = changes()
    for item, change in found.items():
        print(f"CHANGED {item}: {change}" if change else f"ok      {item}")
    changed = sum(map(bool, found.values()))
    print(
        f"{changed} of {len(found)} changed. What they do is tested by `pytest tests/contract`, in a clone of trl_ext."
    )
    sys.exit(bool(changed))


if __name__ == "__main__":
    main()
