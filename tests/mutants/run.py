"""
Show for each mutant of the list that its test catches it.

    python -m tests.mutants.run [--only PATTERN] [--jobs N] [--timeout SECONDS]

First the tests run on the tree as it is, and must pass. Then each mutant is put into a copy of the tree, and its test
must fail. What takes long, importing torch and TRL, is done once: each test runs in a fork. The exit status is 1 if a
mutant was not caught.
"""

import argparse
import ast
import compileall
import gc
import importlib
import os
import py_compile
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from .mutants import ROOT, Mutant, read

OURS = ("trl_ext", "recipes", "tests")
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "outputs", "wandb", "site", "build", "dist", "*.egg-info")
NOT_PRELOADED = (*OURS, "vllm", "deepspeed", "trackio", "IPython")  # ours, and what starts threads or is rarely there
ENVIRONMENT = {  # read once, at import, as in tests/conftest.py; a fork would not have the threads of its parent
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
OPTIONS = ["-n0", "-m", "", "-p", "no:cacheprovider", "-x", "-q", "--no-header", "--tb=line", "-rfE"]
VERDICTS = {0: "NOT CAUGHT", 1: "caught", None: "NOT CAUGHT, it takes too long"}  # by pytest's exit status


@dataclass(frozen=True)
class Run:
    """Tests to run, on a tree with a mutant or as it is."""

    tests: list[str]
    timeout: float
    mutant: Mutant | None = None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run", description=__doc__.strip().split("\n")[0])
    parser.add_argument("--only", default="", metavar="PATTERN", help="regular expression on a mutant's name or file")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="tests at a time")
    parser.add_argument("--timeout", type=float, default=180, metavar="SECONDS", help="of one test")
    args = parser.parse_args()
    mutants = [m for m in read() if re.search(args.only, f"{m.path} {m.name}")]
    start = time.monotonic()
    os.environ.update(ENVIRONMENT)
    preload()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees = [copy_tree(Path(folder) / str(i)) for i in range(max(1, args.jobs))]
        tests = sorted({mutant.test_id() for mutant in mutants})
        files = sorted({test.split("::")[0] for test in tests})  # tests of a file share fixtures
        batches = [[t for t in tests if t.split("::")[0] in files[i :: len(trees)]] for i in range(len(trees))]
        for _, status, _, log in run_all([Run(each, args.timeout * len(each)) for each in batches if each], trees):
            if status != 0:
                print(f"{log[-8000:]}\nWithout a mutant the tests must pass, but pytest exits with {status}.")
                return 1
        print(f"{len(tests)} tests pass without a mutant, {time.monotonic() - start:.0f} s", flush=True)
        missed = 0
        for run, status, seconds, log in run_all([Run([m.test_id()], args.timeout, m) for m in mutants], trees):
            verdict = VERDICTS.get(status, f"NOT CAUGHT, pytest exits with {status}")
            why = re.search(r"^\S+:\d+: .*", log, re.M)
            print(f"{verdict:10} {seconds:5.1f} s  {run.mutant.name}: {why[0][:160] if why else ''}", flush=True)
            missed += status != 1
            if status not in (0, 1):
                print(log[-2000:])
    print(f"{len(mutants)} mutants, {len(mutants) - missed} caught, {time.monotonic() - start:.0f} s")
    return int(missed > 0)


def preload() -> None:
    """Import what the package imports from elsewhere, name by name, since some libraries load lazily."""
    for path in [*(ROOT / "trl_ext").rglob("*.py"), ROOT / "tests" / "tiny.py"]:
        for node in ast.parse(path.read_text()).body:
            names = [(alias.name, "") for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names = [(node.module, alias.name) for alias in node.names]
            for module, name in names:
                if module.split(".")[0] not in NOT_PRELOADED:
                    with suppress(ImportError):  # an optional package
                        getattr(importlib.import_module(module), name, None)
    for plugin in entry_points(group="pytest11"):  # which pytest would import anew, and rewrite, in each child
        with suppress(ImportError):
            plugin.load()
    for name in ("hypothesis", "pytest"):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def copy_tree(folder: Path) -> Path:
    """Copy the tree; what is compiled there is used as long as its source is the same, byte for byte."""
    shutil.copytree(ROOT, folder, ignore=NOT_COPIED, symlinks=True)
    for ours in OURS:
        mode = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(folder / ours, quiet=2, invalidation_mode=mode)
    return folder


def run_all(runs: Iterable[Run], trees: list[Path]) -> Iterator[tuple[Run, int | None, float, str]]:
    """Run each in a tree that is free; yield it with pytest's exit status (None: too late), seconds, and output."""
    waiting, free = deque(runs), list(trees)
    running: dict[int, tuple[Run, Path, float]] = {}
    try:
        while waiting or running:
            while waiting and free:
                run, tree = waiting.popleft(), free.pop()
                if run.mutant is not None:
                    file = run.mutant.file(tree)
                    file.write_text(run.mutant.changed(file.read_text()))
                running[start(tree, run.tests)] = run, tree, time.monotonic()
            time.sleep(0.05)
            for child, (run, tree, began) in list(running.items()):
                is_done, status = os.waitpid(child, os.WNOHANG)
                seconds = time.monotonic() - began
                if not is_done and seconds < run.timeout:
                    continue
                end(child, not is_done)
                del running[child]
                if run.mutant is not None:
                    file = run.mutant.file()
                    shutil.copyfile(file, tree / file.relative_to(ROOT))
                free.append(tree)
                log = log_of(tree).read_text(errors="replace")
                yield run, os.waitstatus_to_exitcode(status) if is_done else None, seconds, log
    finally:
        for child in running:
            end(child, True)


def log_of(tree: Path) -> Path:
    return tree.with_suffix(".log")


def start(tree: Path, tests: list[str]) -> int:
    """Fork a process that runs tests within a tree, and return its id."""
    if child := os.fork():
        return child
    status = 99
    try:
        os.setsid()
        output = os.open(log_of(tree), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(tree)
        os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}  # for processes that a test starts
        sys.dont_write_bytecode = True
        sys.path[:] = [str(tree), *(path for path in sys.path if Path(path).resolve() != ROOT)]
        for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
            del sys.modules[name]
        import pytest

        status = int(pytest.main([*OPTIONS, f"--basetemp={tree.with_suffix('.tmp')}", *tests]))
    except BaseException as error:
        print(repr(error))
    finally:
        sys.stdout.flush()
        os._exit(status)


def end(child: int, is_running: bool) -> None:
    """End a process with all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if is_running:
        os.waitpid(child, 0)


if __name__ == "__main__":
    sys.exit(main())
