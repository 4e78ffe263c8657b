"""Render HTML from Jinja2 templates, which escape every value, and format numbers and answers for it."""

import functools
import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from ...data import tool_calls

TEMPLATES = Path(__file__).parent / "templates"
CHARACTERS, PROMPT, PART = 800, 400, 4000  # most characters of an answer, of a prompt, and of a part of an episode


def render(template: str | Path, **shown: Any) -> str:
    """
    Return a self-contained HTML page, which loads no other file.

    Args:
        template: file that extends `frame.html.j2` and may import `parts.html.j2`, both in the folder `templates`; or
            the name of a file in that folder.
        shown: values for the template. Strings are escaped, unless they are `Markup`.
    """
    page = _environment(Path(template).parent).get_template(Path(template).name).render(shown)
    # HTML does not allow control characters, and UTF-8 no half of a surrogate pair
    return re.sub("[\0-\b\v\f\x0e-\x1f\x7f-\x9f\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", page)


@functools.cache  # it keeps the compiled templates
def _environment(folder: Path) -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # here, so that only writing a page imports it

    environment = Environment(
        loader=FileSystemLoader([folder, TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (code, prose, number, percent, columns, between, with_interval, shown_prompt, shown_answer, shown_scores)
    environment.filters |= {each.__name__: each for each in filters}
    return environment


def code(value: Any) -> Markup:
    """Return text as HTML, with names in backticks as `<code>`."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(value))))


def prose(markdown: str) -> Markup:
    """Return a line of Markdown as HTML; links are replaced by their texts."""
    return Markup(re.sub(r"\*([^*]+)\*", r"<em>\1</em>", str(code(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", markdown)))))


def columns(names: Iterable[str], style: str = "") -> list[tuple[str, str]]:
    """Pair each column's name with the CSS class `style`, as the templates' macro `table` expects its columns."""
    return [(name, style) for name in names]


def number(value: Any, digits: int = 4) -> str:
    """
    Return a number as text with `digits` significant digits; a dash for None; `str(value)` for anything else.

    A number below a billion keeps all digits before the point; a larger or very small number gets an exponent.
    """
    if not isinstance(value, (int, float)):
        return "–" if value is None else str(value)
    if math.isfinite(value) and abs(round(value)) >= 10**digits:
        return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.{digits - 1}e}"
    return f"{value:.{digits}g}"


def with_error(value: float, error: float | None) -> str:
    """
    Return `VALUE ± ERROR`, the error with two significant digits, the value with as many decimals as the error; only
    the value if the error is None.
    """
    if not error or not math.isfinite(error):
        return number(value) + ("" if error is None else f" ± {number(error)}")
    decimals = max(1 - math.floor(math.log10(float(f"{error:.1e}"))), 0)  # 0.0996 is 0.10
    return f"{value:,.{decimals}f} ± {error:,.{decimals}f}"


def between(ends: Sequence[float], form: str = ".1%") -> str:
    """Return the two ends of an interval as text, `60.1% to 77.8%`, each formatted by `form`."""
    return " to ".join(f"{end:{form}}" for end in ends)


def with_interval(value: float | None, ends: Sequence[float] | None, form: str = ".1%", unknown: str = "–") -> str:
    """
    Return a value and its interval as text, `69.5% (60.1% to 77.8%)`.

    Args:
        value: the value; if it is None, `unknown` is returned.
        ends: lower and upper end of the interval; if None, only the value is returned.
        form: format of each number.
        unknown: the text for a value of None.
    """
    if value is None:
        return unknown
    return f"{value:{form}} ({between(ends, form)})" if ends else f"{value:{form}}"


def percent(share: float | None) -> str:
    """Return a share as a percentage with one decimal; a dash for None."""
    return "–" if share is None else f"{share:.1%}"


def shown_prompt(prompt: Any) -> str:
    """Return the last 400 characters of a prompt; messages become lines `role: content`."""
    text = prompt if isinstance(prompt, str) else "\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)
    return text[-PROMPT:]


def shown_scores(scores: dict[str, Any]) -> str:
    """Return an answer's scores as a line, `gold 0.2, length 31`, cut after 400 characters; None is left out."""
    return ", ".join(f"{name} {number(s)}" for name, s in scores.items() if s is not None)[:400]


def shown_answer(completion: Any, said: str = "") -> dict[str, Any]:
    """
    Return an answer as a cell for the templates' tables; long texts are cut.

    The cell is a dict with `said`, and with `text` or, for messages, `turns`: a list of (CSS class, who, text), one
    for each part of each message, such as a thought or a tool call.

    Args:
        completion: the answer, text or messages.
        said: a line to show below the answer, such as its scores.
    """
    if not isinstance(completion, list):
        return {"text": str(completion)[:CHARACTERS], "said": said}
    return {"turns": [part for message in completion for part in _parts(message)], "said": said}


def _parts(message: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return (CSS class, who, text) of each part of a message: a thought, a text, tool calls, or a tool's answer."""
    role = message["role"]
    content = message.get("content") or ""
    text = (content if isinstance(content, str) else json.dumps(content, ensure_ascii=False))[:PART]
    if role == "tool":  # TRL tells the policy of a failed call in this form
        return [("fails" if text.startswith("{'error':") else "hears", f"{message.get('name', 'tool')} said", text)]
    if role != "assistant":
        return [("hears", role, text)]
    thought = message.get("reasoning_content") or message.get("thinking")
    parts = [("thinks", "thought", str(thought)[:PART])] if thought else []
    parts += [("says", "policy", text)] if text.strip() else []
    calls = [f"{name}({json.dumps(given, ensure_ascii=False)})" for name, given in tool_calls(message)]
    return parts + [("calls", "call", call[:PART]) for call in calls]
