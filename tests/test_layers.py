"""The rules of imports between packages."""

import ast
import sys
from importlib import import_module
from inspect import ismodule
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "trl_ext"


def sources(folder):
    return sorted((ROOT / folder).rglob("*.py"))


def module_of(path):
    """The dotted name of a file of the package."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path):
    """Absolute dotted names of a file's imports, also inside functions and `if TYPE_CHECKING`."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]  # of `a/b.py` and of `a/__init__.py`: a
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def inside(name, *modules):
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def is_public(module, name):
    """Whether a package lists a name in `__all__` or, without `__all__`, has a name that is no module."""
    package = import_module(module)
    if hasattr(package, "__all__"):
        return name in package.__all__
    return hasattr(package, name) and not ismodule(getattr(package, name))


def test_functional_imports_torch_and_scipy_only():
    for path in sources("trl_ext/functional"):
        for name in imports(path):
            allowed = (
                inside(name, "torch", "scipy", "trl_ext.functional") or name.split(".")[0] in sys.stdlib_module_names
            )
            assert allowed, f"{path.relative_to(ROOT)} imports {name}: `functional` is maths on tensors."


# The packages of docs/architecture.md from the bottom; packages in one line never import each other
FLOORS = [
    ["functional", "upstream"],
    ["models", "evaluation"],
    ["runs"],
    ["data", "rewards"],
    ["callbacks"],
    ["ppo", "dpo", "cli", "workbench.pages"],
    [f"workbench.{tool}" for tool in ("labels", "planning", "reports")],
    ["workbench.feedback"],
]
LAYER = [room for floor in FLOORS for room in floor if room.partition(".")[0] not in ("cli", "workbench")]
LOOSE = {"trl_ext", "trl_ext.__main__"}  # their imports are lazy


def room_of(name):
    """The room of a module in `FLOORS`, and the number of its floor; None if it is in no room."""
    for place, floor in enumerate(FLOORS):
        for room in floor:
            if inside(name, f"trl_ext.{room}"):
                return room, place
    return None


def test_every_file_is_in_a_room():
    for path in sources("trl_ext"):
        name = module_of(path)
        assert room_of(name) or name in {*LOOSE, "trl_ext.workbench"}, f"{path.relative_to(ROOT)} is in no room."


@pytest.mark.slow
def test_imports_go_down_the_floors():
    for path in sources("trl_ext"):
        if (here := room_of(module_of(path))) is None:
            continue
        for name in imports(path):
            there = room_of(name)
            goes_down = there is None or there[0] == here[0] or there[1] < here[1]
            assert goes_down, f"{path.relative_to(ROOT)} imports {name}: arrows go down the list of rooms."


@pytest.mark.slow
def test_the_layer_imports_neither_workbench_nor_command_line():
    for room in LAYER:
        for path in sources(f"trl_ext/{room}"):
            for name in imports(path):
                above = inside(name, "trl_ext.workbench", "trl_ext.cli", "trl_ext.recipes", "recipes")
                assert not above, f"{path.relative_to(ROOT)} imports {name}: a run reaches it by name, or not at all."


@pytest.mark.slow
def test_workbench_and_recipes_import_public_names_only():
    rooms = {f"trl_ext.{room}" for room in LAYER}
    for path in [*sources("trl_ext/workbench"), *sources("recipes")]:
        attributes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
        used = {(ast.unparse(node.value), node.attr) for node in attributes}
        names = list(imports(path))
        for room in rooms & {*names}:  # a package imported as a module: the names that the file uses
            names.remove(room)
            names += [f"{room}.{name}" for of, name in used if of == room.rpartition(".")[2]]
        for name in names:
            module, _, attribute = name.rpartition(".")
            if not inside(name, "trl_ext") or inside(name, "trl_ext.cli", "trl_ext.workbench"):
                assert not inside(name, "trl_ext") or not attribute.startswith("_"), (
                    f"{path.relative_to(ROOT)}: {name}"
                )
                continue
            assert module in {"trl_ext", *rooms} and is_public(module, attribute), (
                f"{path.relative_to(ROOT)} imports {name}: take a name that its room exports."
            )


@pytest.mark.slow
def test_type_checkers_see_the_lazy_names():
    """What a package lists for `lazily` exists, and is what the package imports under `if TYPE_CHECKING`."""
    for path in sources("trl_ext"):
        if path.name != "__init__.py" or "lazily(" not in path.read_text():
            continue
        package = import_module(module_of(path))
        listed = {name for name in package.__all__ if getattr(package, name)}
        checked = [name.rpartition(".")[::2] for name in imports(path) if inside(name, "trl_ext", "trl")]
        named = {name for _, name in checked} - {"*", "lazily"}
        starred = {name for module, star in checked if star == "*" for name in dir(import_module(module))}
        assert named <= listed <= named | starred, path.relative_to(ROOT)


@pytest.mark.slow
def test_private_names_of_trl_are_in_one_file():
    """Only one file, which tests/contract covers, names modules of TRL that are not public API."""
    public = ("trl.trainer.callbacks", "trl.rewards")
    for path in sources("trl_ext"):
        for name in imports(path):
            if path == PACKAGE / "upstream" / "names.py" or not inside(name, "trl") or inside(name, *public):
                continue
            assert name.count(".") <= 1, (
                f"{path.relative_to(ROOT)} imports {name}: do so in trl_ext/upstream/names.py."
            )
