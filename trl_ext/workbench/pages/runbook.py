"""Put the runbook's sections into a page, so that an alert's link works wherever the page is copied."""

from collections.abc import Iterable
from typing import Any

from ...runs import RUNBOOK, root


def sections() -> dict[str, list[str]]:
    """Return the runbook's sections: name → lines."""
    parts = (root() / RUNBOOK).read_text(encoding="utf-8").split("\n## ")[1:]
    return {part.splitlines()[0].strip(): part.splitlines()[1:] for part in parts}


def section_of(alert: dict[str, Any]) -> str:
    """Return the name of the runbook's section that an alert links to; "" if it links to none."""
    return str(alert.get("runbook")).partition("#")[2]


def what_to_do(alerts: Iterable[dict[str, Any]]) -> dict[str, list[list[str]]]:
    """Return section → table for the sections that these alerts link to; a table is rows of cells in Markdown."""
    wanted, tables = {section_of(alert) for alert in alerts}, {}
    for name, lines in sections().items():
        rows = [line.strip(" |").split(" | ") for line in lines if line.startswith("|") and not line.startswith("|--")]
        if name in wanted and rows:
            tables[name] = rows
    return tables
