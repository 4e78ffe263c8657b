"""What may import what (the layout's rules), and what no file of the project may name."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import trl_ext

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "trl_ext"


def sources(folder):
    return sorted((ROOT / folder).rglob("*.py"))


def imports(path):
    """Absolute dotted names of all that a file imports, also inside functions and `if TYPE_CHECKING`."""
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


def test_functional_imports_torch_only():
    for path in sources("trl_ext/functional"):
        for name in imports(path):
            allowed = inside(name, "torch", "trl_ext.functional") or name.split(".")[0] in sys.stdlib_module_names
            assert allowed, f"{path.relative_to(ROOT)} imports {name}: `functional` is maths on tensors."


@pytest.mark.parametrize("layer", ["rewards", "callbacks", "data"])
def test_layers_that_work_in_anybodys_script_import_no_trainer(layer):
    for path in sources(f"trl_ext/{layer}"):
        for name in imports(path):
            trainer = inside(name, "trl_ext.ppo", "trl_ext.dpo") or re.search(r"^(trl|transformers)\..*Trainer$", name)
            assert not trainer, f"{path.relative_to(ROOT)} imports {name}: take `trainer=` as an argument instead."


# As docs/architecture.md lists them, from the top; what stands in one line is on one floor
FLOORS = [
    ["recipes.demo"],
    ["recipes"],
    ["trl_ext.commands"],
    ["trl_ext.planning"],
    ["trl_ext.ppo", "trl_ext.dpo"],
    ["trl_ext.callbacks", "trl_ext.rewards", "trl_ext.data", "trl_ext.evaluation"],
    ["trl_ext.models"],
    ["trl_ext.functional"],
]


def test_imports_go_down_the_floors():
    def floor(name):
        return next((i for i, rooms in enumerate(FLOORS) if inside(name, *rooms)), None)

    for path in [*sources("trl_ext"), *sources("recipes")]:
        here = floor(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for name in imports(path):
            there = floor(name)
            goes_up = None not in (here, there) and there < here
            assert not goes_up, f"{path.relative_to(ROOT)} imports {name}: arrows go down docs/architecture.md's list."


@pytest.mark.parametrize("trainer, other", [("ppo", "dpo"), ("dpo", "ppo")])
def test_trainers_never_import_each_other(trainer, other):
    for path in sources(f"trl_ext/{trainer}"):
        for name in imports(path):
            assert not inside(name, f"trl_ext.{other}"), f"{path.relative_to(ROOT)} imports {name}."


def test_recipes_import_public_names_only():
    packages = {
        "trl_ext",
        "trl_ext.arguments",
        "trl_ext.checkpoints",
        "trl_ext.data.annotators",
        "trl_ext.model_names",
        "trl_ext.output_dir",
        "trl_ext.resumable",
        "trl_ext.shipped",
        "trl_ext.terminal",
        *(f"trl_ext.{path.parent.name}" for path in PACKAGE.glob("*/__init__.py")),
    }
    for path in sources("recipes"):
        for name in imports(path):
            if not inside(name, "trl_ext"):
                continue
            private = inside(name, "trl_ext.upstream") or any(part.startswith("_") for part in name.split("."))
            assert not private, f"{path.relative_to(ROOT)} imports {name}, which is private."
            module, _, attribute = name.rpartition(".")
            if module == "trl_ext":
                assert attribute in trl_ext.__all__, f"{path.relative_to(ROOT)} imports {name}, not in `__all__`."
            else:
                assert module in packages, f"{path.relative_to(ROOT)} reaches into {module}: import it from trl_ext."


def test_private_names_of_upstream_come_through_one_file():
    """Modules of TRL that are no public API are named in upstream.py alone, which tests/contract pins."""
    public = ("trl.trainer.callbacks", "trl.rewards")
    for path in sources("trl_ext"):
        for name in imports(path):
            if path == PACKAGE / "upstream.py" or not inside(name, "trl") or inside(name, *public):
                continue
            assert name.count(".") <= 1, f"{path.relative_to(ROOT)} imports {name}: do so in trl_ext/upstream.py."


def tracked_files():
    try:
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
        files = [ROOT / name for name in names if name]
    except (OSError, subprocess.CalledProcessError):  # a copy without its history
        generated = {".venv", "__pycache__", "outputs", "build", ".git"}
        files = [path for path in ROOT.rglob("*") if not generated & set(path.relative_to(ROOT).parts)]
        files = [path for path in files if not any(part.startswith(".") or "egg-info" in part for part in path.parts)]
    return [path for path in files if path.is_file()]


def test_no_file_names_a_path_of_a_machine():
    """Somebody's home, work or temporary folder: it is on no other machine."""
    folders = "|".join(("home", "root", "Users", "work", "workspace", "mnt", "scratch", "tmp"))
    machine_path = re.compile(rf"(?<![\w.\-}}/:*])/(?:{folders})/[\w.\-]+")
    for path in tracked_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            found = machine_path.search(line)
            assert not found, f"{path.relative_to(ROOT)}:{number} names {found[0]}, a path of one machine."
