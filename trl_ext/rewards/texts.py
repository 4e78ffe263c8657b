"""What a reward reads of a completion: its text, and the words of that."""

from typing import Any

import regex

from ..data.scripts import UNSPACED

_UNSPACED_OR_RUN = regex.compile(rf"[{UNSPACED}]|[^{UNSPACED}]+")
_BLOCK = regex.compile(r"(?ms)^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```")


def words_of(text: str) -> list[str]:
    """Return the words of a text; in scripts without spaces each character counts as one."""
    return [part for word in text.split() for part in _UNSPACED_OR_RUN.findall(word)]


def text_of(completion: Any) -> str:
    """Return the text of a prompt or completion, whether it is text or messages."""
    return completion if isinstance(completion, str) else "\n".join(str(turn.get("content")) for turn in completion)


def last_block(text: str) -> str:
    """Return what stands in the last fenced block (```) of a text, or all of it if there is none."""
    return ([text, *_BLOCK.findall(text)])[-1]
