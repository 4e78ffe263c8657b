"""The runbook's sections within a page, so that an alert's link works wherever the page is taken."""

from collections.abc import Iterable
from typing import Any

from ...runs import RUNBOOK, root
from .markup import Markup, escape, html


def sections() -> dict[str, list[str]]:
    """Lines of each section of the runbook."""
    parts = (root() / RUNBOOK).read_text(encoding="utf-8").split("\n## ")[1:]
    return {part.splitlines()[0].strip(): part.splitlines()[1:] for part in parts}


def link(alert: dict[str, Any]) -> str:
    """A link to what to do about an alert, or what the alert says where that is."""
    section = section_of(alert)
    if section not in sections():
        return escape(f"({str(alert.get('runbook'))[:200]})")
    return html.link(f"#runbook-{section}", "What to do")


def section_of(alert: dict[str, Any]) -> str:
    return str(alert.get("runbook")).partition("#")[2]


def what_to_do(alerts: Iterable[dict[str, Any]]) -> str:
    """The sections that these alerts link to."""
    wanted, written = {section_of(alert) for alert in alerts}, Markup()
    for name, lines in sections().items():
        rows = [line.strip(" |").split(" | ") for line in lines if line.startswith("|") and not line.startswith("|--")]
        if name in wanted and rows:
            written += html.subsection(name, html.runbook(rows[0], rows[1:]), f"runbook-{name}")
    return html.section("What to do", written) if written else ""
