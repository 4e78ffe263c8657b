import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ("agents", "memory", "ppo", "ppo_measure", "ppo_work")  # they import each other as scripts do
MODULES = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "benchmarks").rglob("*.py")]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_benchmark_is_imported(name, monkeypatch):
    if name.split(".")[-1] in SCRIPTS:
        monkeypatch.syspath_prepend(ROOT / "benchmarks")
        name = name.split(".")[-1]
    importlib.import_module(name)
