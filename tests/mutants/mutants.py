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
        Return the file to change: the one at `path`, or, if `old` has moved, the only one of the package that has it.

        Raises:
            ValueError: no file has `old`, one has it twice, or several have it.
        """
        file = root / self.path
        if file.is_file() and (found := file.read_text().count(self.old)):
            if found == 1:
                return file
            raise ValueError(f"{self.name}: {self.path} has {self.old!r} {found} times, not once")
        files = [path for path in sorted((root / "trl_ext").rglob("*.py")) if path.read_text().count(self.old) == 1]
        for moved in ([path for path in files if path.name == file.name], files):
            if len(moved) == 1:
                return moved[0]
        raise ValueError(f"{self.name}: {self.path} does not have {self.old!r}, and {len(files)} other files have it")

    def changed(self, text: str) -> str:
        """Return the text of the file with the fault."""
        return text.replace(self.old, self.new)

    @property
    def function(self) -> str:
        """The name of the test function."""
        return self.test.split("::")[1].split("[")[0]

    def test_file(self, root: Path = ROOT) -> Path:
        """
        Return the file of the test, or, if that has moved, the only one with a test of its name.

        Raises:
            ValueError: there is none.
        """
        file = root / self.test.split("::")[0]
        if file.is_file() and self.function in functions_of(file):
            return file
        files = sorted((root / "tests").rglob("test_*.py"))
        found = [path for path in files if self.function in functions_of(path)]
        for moved in ([path for path in found if path.name == file.name], found):
            if len(moved) == 1:
                return moved[0]
        raise ValueError(f"{self.name}: {len(found)} files have a test {self.function}")

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
