"""Show an answer on a page: as text, or turn by turn where tools were called."""

import json
from dataclasses import dataclass
from typing import Any, Literal

from ...data import tool_calls

CHARACTERS, PROMPT = 800, 400  # most characters shown: CHARACTERS of an answer without turns, PROMPT of a prompt
PART, PARTS = 4000, 200  # an answer has at most PARTS parts, each of at most PART characters
OPEN, HEAD, TAIL = 240, 6, 3  # folded are parts of over OPEN characters, and all but the first HEAD and last TAIL


@dataclass(frozen=True)
class Part:
    """Hold one part of an answer: a text of the policy, of a tool or of another role, or a call of a tool."""

    kind: Literal["says", "thinks", "calls", "hears", "fails"]
    who: str
    text: str

    @property
    def is_long(self) -> bool:
        """Return whether the part is folded, so that only its first line shows."""
        return len(self.text) > OPEN or self.text.count("\n") > 4

    @property
    def first_line(self) -> str:
        """Return the line that shows while the part is folded."""
        line = self.text.strip().partition("\n")[0]
        return f"{line[:80]}…"


def shown_answer(completion: Any, said: str = "") -> dict[str, Any]:
    """
    Return an answer as a cell for the templates' tables.

    Args:
        completion: the answer as a file has it: a text, or messages, which are shown in parts.
        said: a line to show below the answer, such as its scores.

    Returns:
        For a text `text` and `said`; for messages `said` and three lists of parts: `head`, `middle` (folded), `tail`.
    """
    if not isinstance(completion, list):
        return {"text": str(completion)[:CHARACTERS], "said": said}
    messages = [message if isinstance(message, dict) else {"content": message} for message in completion]
    parts = [part for message in messages for part in _parts(message)][:PARTS]
    if len(parts) <= HEAD + TAIL + 1:
        return {"head": parts, "middle": [], "tail": [], "said": said}
    return {"head": parts[:HEAD], "middle": parts[HEAD:-TAIL], "tail": parts[-TAIL:], "said": said}


def shown_prompt(prompt: Any) -> str:
    """Return the last 400 characters of a prompt; messages become lines `role: content`."""
    text = prompt if isinstance(prompt, str) else "\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)
    return text[-PROMPT:]


def _parts(message: dict[str, Any]) -> list[Part]:
    """Return the parts of a message, in the order in which they were said."""
    role, content = message.get("role"), message.get("content")
    text = (content if isinstance(content, str) else json.dumps(content, ensure_ascii=False) if content else "")[:PART]
    if role == "tool":
        has_failed = text.startswith("{'error':")  # TRL tells the policy of a failed call in this form
        return [Part("fails" if has_failed else "hears", f"{message.get('name') or 'tool'} said", text)]
    parts = [] if role in ("assistant", None) else [Part("hears", str(role), text)]
    if not parts:
        thought = message.get("reasoning_content") or message.get("thinking")
        parts = [Part("thinks", "thought", str(thought)[:PART])] if thought else []
        parts += [Part("says", "policy", text)] if text.strip() else []
    return parts + [Part("calls", "call", _call(name, given)[:PART]) for name, given in tool_calls(message)]


def _call(name: str, given: Any) -> str:
    """Return a call of a tool as `name(key=value)`, with each value in JSON."""
    if not isinstance(given, dict):
        return f"{name}({json.dumps(given, ensure_ascii=False)})"
    return f"{name}({', '.join(f'{key}={json.dumps(value, ensure_ascii=False)}' for key, value in given.items())})"
