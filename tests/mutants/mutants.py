"""The list of mutants: small faults in the package, and for each the test that catches it."""

import ast
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutants.toml")


@dataclass(frozen=True)
class Mutant:
    """A fault: `old` stands once in the file, `new` takes its place, and the test must fail then."""

    name: str
    path: str  # from the root
    old: str
    new: str
    test: str  # file::function, or file::function[parameters]

    def file(self, root: Path = ROOT) -> Path:
        """
        Return the file to change: the one at `path`, or, if that has moved, the only one of the package with `old`.

        Raises:
            ValueError: `old` does not stand exactly once in the file, or no single file has it.
        """
        if (file := root / self.path).is_file():
            if (found := file.read_text().count(self.old)) == 1:
                return file
            raise ValueError(f"{self.name}: {self.path} has {self.old!r} {found} times, not once")
        files = [path for path in sorted((root / "trl_ext").rglob("*.py")) if path.read_text().count(self.old) == 1]
        same_name = [path for path in files if path.name == file.name]
        for moved in (same_name, files):
            if len(moved) == 1:
                return moved[0]
        raise ValueError(f"{self.name}: {self.path} is gone, and {len(files)} files have {self.old!r} once")

    def changed(self, text: str) -> str:
        """Return the text of the file with the fault."""
        return text.replace(self.old, self.new)

    @property
    def function(self) -> str:
        """The name of the test function."""
        return self.test.split("::")[1].split("[")[0]

    def test_file(self, root: Path = ROOT) -> Path:
        """
        Return the file of the test, or the only one of its name with that function if it has moved.

        Raises:
            ValueError: there is none.
        """
        file = root / self.test.split("::")[0]
        found = [file] if file.is_file() else sorted((root / "tests").rglob(file.name))
        found = [path for path in found if self.function in functions_of(path)]
        if len(found) == 1:
            return found[0]
        raise ValueError(f"{self.name}: {len(found)} files {file.name} have a test {self.function}")

    def test_id(self, root: Path = ROOT) -> str:
        """Return the test as pytest knows it, from the root."""
        return "::".join([str(self.test_file(root).relative_to(root)), self.test.split("::", 1)[1]])


@cache
def functions_of(path: Path) -> set[str]:
    """Return the names of a file's own functions."""
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def read(path: Path = LIST) -> list[Mutant]:
    """Return the list; see the head of mutants.toml."""
    by_file = tomllib.loads(path.read_text())
    return [Mutant(name, file, *rest) for file, mutants in by_file.items() for name, rest in mutants.items()]
