"""The HTML that pages are made of: Jinja2 templates, in which whatever is no HTML of ours is escaped."""

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape


def code(value: Any) -> Markup:
    """Return text whose names in backticks are set as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(value))))


def prose(markdown: str) -> Markup:
    """Return a line of Markdown as HTML, its links as their words."""
    return Markup(re.sub(r"\*([^*]+)\*", r"<em>\1</em>", str(code(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", markdown)))))


def number(value: Any, digits: int = 4) -> str:
    """Return a number in so many significant digits, without an exponent up to a billion."""
    if not isinstance(value, (int, float)):
        return "–" if value is None else str(value)
    if math.isfinite(value) and abs(value) >= 10**digits:
        return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.{digits - 1}e}"
    return f"{value:.{digits}g}"


_environment = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_environment.filters |= {"code": code, "prose": prose}
# The macros, by which Python makes parts of a page: `html.table(columns, rows)`
html: Any = _environment.get_template("parts.html.j2").module


def document(title: str, sections: Iterable[str]) -> str:
    """Return a whole page. It loads nothing: what it shows is within it."""
    page = _environment.get_template("page.html.j2").render(title=title, parts=sections)
    # HTML has no such characters, and UTF-8 no half of a surrogate pair
    return re.sub("[\0-\b\v\f\x0e-\x1f\x7f-\x9f\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", page)
