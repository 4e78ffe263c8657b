"""The runbook has a section for each monitor and an entry for each of its alerts."""

import ast
import re
from pathlib import Path

import trl_ext.callbacks as callbacks
from trl_ext.callbacks import MonitorCallback

ROOT = Path(__file__).parents[2]
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text()
MONITORS = [
    cls
    for name in callbacks.__all__
    if isinstance(cls := getattr(callbacks, name), type) and issubclass(cls, MonitorCallback) and cls.runbook
]


def texts_of_findings(path):
    """Yield the longest constant part of the text of each `Finding(...)` in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding":
            text = ast.unparse(node.args[0]) if not isinstance(node.args[0], ast.Constant) else node.args[0].value
            yield max(re.split(r"\{.*?\}", text.removeprefix("f").strip("'\"")), key=len).strip(" ,`'\"")


def test_section(subtests):
    for monitor in MONITORS:
        with subtests.test(monitor=monitor):
            assert f"\n## {monitor.runbook}\n\nWhat `{monitor.__name__}` says.\n" in RUNBOOK


def test_entries(subtests):
    for path in sorted((ROOT / "trl_ext" / "callbacks").glob("*.py")):
        with subtests.test(path=path):
            for text in texts_of_findings(path):
                if text not in ("what", "found", "name"):
                    assert text.split(":")[0] in RUNBOOK, f"{path.name} says {text!r}"
