"""The HTML that pages are made of: escaped text, tables, tiles, and the style for screen, phone and paper."""

import html
import math
import re
from collections.abc import Iterable
from typing import Any

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --soft: #f3f4f6; --line: #d0d5dc; --red: #b42318;
  --amber: #8a5c00; --link: #0b5cad; }
@media screen and (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --paper: #14171c; --soft: #1b2027;
  --line: #3a414c; --red: #ff8f85; --amber: #e9b949; --link: #8ec5ff; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; max-width: 75rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
a { color: var(--link); } :focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
.tiles, .charts { display: grid; gap: .8rem; grid-template-columns: repeat(auto-fill, minmax(8.2rem, 1fr)); }
.charts { grid-template-columns: repeat(auto-fill, minmax(min(22rem, 100%), 1fr)); }
.tile { background: var(--soft); border-radius: .5rem; padding: .6rem .8rem; }
.tile b { display: block; font-size: 1.1rem; font-variant-numeric: tabular-nums; }
figure { margin: 0; background: var(--soft); border-radius: .5rem; padding: .4rem; color: var(--ink); }
svg { width: 100%; height: auto; display: block; } svg.key { width: 2.4rem; height: .8rem; display: inline; }
table { border-collapse: collapse; width: 100%; } td, th { border-top: 1px solid var(--line); padding: .35rem .6rem;
  text-align: left; vertical-align: top; } td, tbody th { overflow-wrap: anywhere; } tbody th { font-weight: normal; }
thead th, td.short, td.number, th.short { white-space: nowrap; }
td.short { max-width: 16rem; overflow: hidden; text-overflow: ellipsis; }
td.number { font-variant-numeric: tabular-nums; } td.text { white-space: pre-line; } .wide { overflow-x: auto; }
.verdict { font-size: 1.1rem; margin: .4rem 0 .8rem; overflow-wrap: anywhere; }
.act { color: var(--red); font-weight: 600; } .warn { color: var(--amber); } .none { opacity: .75; }
@media screen and (max-width: 44rem) { .wide td { display: block; border: 0; padding: .1rem 0; max-width: none;
    white-space: normal; } .wide td.text { white-space: pre-line; }
  .wide thead { display: none; } .wide tr { display: block; border-top: 1px solid var(--line); padding: .4rem 0; }
  .wide td[data-name]::before { content: attr(data-name) ": "; opacity: .75; } }
@media print { :root { color-scheme: light; --soft: #ffffff; } @page { margin: 14mm; }
  body { max-width: none; margin: 0; padding: 0; font-size: 9.5pt; }
  figure, .tile { border: 1px solid var(--line); } figure, .tile, tr { break-inside: avoid; }
  h2, h3, summary { break-after: avoid; } .own-page { break-before: page; }
  .charts { grid-template-columns: 1fr 1fr; } .tiles { grid-template-columns: repeat(4, 1fr); }
  .wide { overflow: visible; } thead th, td.short { white-space: normal; }
  td.short { max-width: none; overflow-wrap: break-word; }
  details::details-content { content-visibility: visible; block-size: auto; } summary { list-style: none; }
  .settings { columns: 2; font-size: 8pt; } .settings table { table-layout: fixed; }
  .settings td, .settings th { padding: .1rem .3rem; } }
"""


def document(title: str, parts: Iterable[str]) -> str:
    """A whole page. It loads nothing: what it shows is within it."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{text(title)}</title>'
    body = f"<main><h1>{text(title)}</h1>{''.join(parts)}</main>"
    return f'<!doctype html><html lang="en"><head>{head}<style>{STYLE}</style></head><body>{body}</body></html>\n'


def section(title: str, body: str, style: str = "") -> str:
    return f'<section class="{style}"><h2>{text(title)}</h2>{body}</section>'


def none(sentence: str) -> str:
    """A sentence in the place of what is not there. It is HTML."""
    return f'<p class="none">{sentence}</p>'


def text(value: Any) -> str:
    # HTML has no such characters, and UTF-8 no half of a surrogate pair
    shown = re.sub("[\0-\b\v\f\x0e-\x1f\x7f-\x9f\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", str(value))
    return html.escape(shown)


def code(value: Any) -> str:
    """Text whose names in backticks are set as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", text(value))


def prose(markdown: str) -> str:
    """A line of Markdown, its links as their words."""
    return re.sub(r"\*([^*]+)\*", r"<em>\1</em>", code(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", markdown)))


def number(value: Any, digits: int = 4) -> str:
    """A number in so many significant digits, and without an exponent up to a billion."""
    if not isinstance(value, (int, float)):
        return "–" if value is None else text(value)
    if math.isfinite(value) and abs(value) >= 10**digits:
        return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.{digits - 1}e}"
    return f"{value:.{digits}g}"


def tiles(shown: dict[str, str]) -> str:
    """Names and their values, each in a box."""
    boxes = "".join(f'<div class="tile">{text(name)}<b>{text(value)}</b></div>' for name, value in shown.items())
    return f'<div class="tiles">{boxes}</div>'


def table(columns: Iterable[tuple[str, str]], rows: list[list[str]], before: dict[str, str] | None = None) -> str:
    """
    A table of HTML cells; on a narrow page each cell says its column's name.

    Args:
        columns: name and class of its cells: `number`, `short` (one line), `text` (line breaks are kept) or none.
            Names need not differ: a run may be called as the column before it.
        rows: cells, one a column.
        before: name → HTML before it in the head.
    """
    columns = list(columns)
    head = "".join(f'<th scope="col">{(before or {}).get(name, "")}{text(name)}</th>' for name, _ in columns)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="{style}" data-name="{text(name)}">{cell}</td>'
            for (name, style), cell in zip(columns, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
