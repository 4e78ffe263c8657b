"""Show whether the installed TRL and other libraries still have the names that trl_ext relies on.

    python -m trl_ext.cli.contract

This prints a line for each name, "ok" or what changed, and exits with 1 if any name changed. Only names, parameters
and attributes are compared; what the names do is tested by `pytest -m "" tests/contract`.
"""

if __name__ == "__main__":  # before the libraries that are imported next
    from ..upstream.packages import quiet

    quiet()

import sys
from importlib.metadata import version

import trl_ext

from ..upstream.contract import function_change
from ..upstream.names import ATTRIBUTES, METHODS, NAMES, TESTED, changes_of_class, names_taken


def changes() -> dict[str, str]:
    """
    Compare the names of TRL and other libraries that trl_ext uses with those of the versions that it was tested with.

    Returns:
        A dict from each name to a sentence on how the installed version differs, "" if it does not. For
        `trl_ext.PPOTrainer` and `trl_ext.DPOTrainer` the sentence lists the names that this trainer and TRL's both
        define, by accident.
    """
    found = {
        f"{module}.{name}": function_change(f"{module}.{name}", passed)
        for module, names in NAMES.items()
        for name, passed in names.items()
    }
    for path in METHODS | ATTRIBUTES:
        found |= changes_of_class(path)
    for trainer in ("PPOTrainer", "DPOTrainer"):
        try:
            taken = names_taken(getattr(trl_ext, trainer))
        except ImportError as error:
            taken = str(error)
        found[f"trl_ext.{trainer}"] = taken
    return found


def main() -> None:
    for package, tested in TESTED.items():
        print(f"{package} {version(package)}, tested with {tested}")
    found = changes()
    for item, change in found.items():
        print(f"CHANGED {item}: {change}" if change else f"ok      {item}")
    changed = sum(map(bool, found.values()))
    if changed:
        print(
            f"Of the {len(found)} names of other libraries that trl_ext uses, {changed} changed since the tested "
            "versions, so trl_ext may fail there. Install the tested versions (constraints.txt). In a clone, "
            '`pytest -m "" tests/contract` says whether the change matters.'
        )
    else:
        print(f"All {len(found)} names of other libraries that trl_ext uses are as in the tested versions.")
    sys.exit(bool(changed))


if __name__ == "__main__":
    main()
