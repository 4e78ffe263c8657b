"""Get a completion's text or its words."""

from typing import Any

import regex

from ..upstream.scripts import UNSPACED as UNSPACED

_UNSPACED_OR_RUN = regex.compile(rf"[{UNSPACED}]|[^{UNSPACED}]+")


def words_of(text: str) -> list[str]:
    """Return the words of a text; in scripts without spaces each character counts as one word."""
    if text.isascii():  # all its scripts have spaces
        return text.split()
    return [part for word in text.split() for part in _UNSPACED_OR_RUN.findall(word)]


def text_of(completion: Any) -> str:
    """
    Return a prompt or completion, a text or messages, as one text; the messages of tools are left out.

    >>> text_of([{"role": "user", "content": "Tea?"}])
    'Tea?'
    >>> text_of([{"role": "tool", "content": "12:00"}, {"role": "assistant", "content": "At noon."}])
    'At noon.'
    """
    if isinstance(completion, str):
        return completion
    contents = (turn.get("content") for turn in completion if turn.get("role") != "tool")
    return "\n".join(str(content) for content in contents if content not in (None, ""))


def recorded(completion: Any) -> Any:
    """Return a completion as files record it: its messages if there are several or a tool call, else its text."""
    if isinstance(completion, str) or (len(completion) == 1 and not completion[0].get("tool_calls")):
        return text_of(completion)
    return completion
