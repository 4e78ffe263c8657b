"""Show an answer on a page: as text, or turn by turn where tools were called."""

import json
from dataclasses import dataclass
from typing import Any, Literal

from ...data import tool_calls

CHARACTERS, PROMPT = 800, 400  # of an answer without turns, and of a prompt
PART, PARTS = 4000, 200  # characters of a part, and parts, that a page holds
OPEN, HEAD, TAIL = 240, 6, 3  # characters that are not folded, and parts at both ends


@dataclass(frozen=True)
class Part:
    """Hold one part of an answer: what somebody said, or a call of a tool."""

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
    Return a cell for the templates' tables that shows an answer.

    Args:
        completion: the answer as a file has it: a text, or messages, which are shown in parts.
        said: a line to show below it, such as its scores.

    Returns:
        `text`, or the lists of parts `head`, `middle` (folded) and `tail`; and `said`.
    """
    if not isinstance(completion, list):
        return {"text": str(completion)[:CHARACTERS], "said": said}
    messages = [message if isinstance(message, dict) else {"content": message} for message in completion]
    parts = [part for message in messages for part in _parts(message)][:PARTS]
    if len(parts) <= HEAD + TAIL + 1:
        return {"head": parts, "middle": [], "tail": [], "said": said}
    return {"head": parts[:HEAD], "middle": parts[HEAD:-TAIL], "tail": parts[-TAIL:], "said": said}


def shown_prompt(prompt: Any) -> str:
    """Return the end of a prompt, a text or messages, as a page's table shows it."""
    text = prompt if isinstance(prompt, str) else "\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)
    return text[-PROMPT:]


def _parts(message: dict[str, Any]) -> list[Part]:
    """Return the parts of a message, in the order in which they were said."""
    role, content = message.get("role"), message.get("content")
    text = (content if isinstance(content, str) else json.dumps(content, ensure_ascii=False) if content else "")[:PART]
    if role == "tool":
        has_failed = text.startswith("{'error':")  # so TRL tells the policy
        return [Part("fails" if has_failed else "hears", f"{message.get('name') or 'tool'} said", text)]
    parts = [] if role in ("assistant", None) else [Part("hears", str(role), text)]
    if not parts:
        thought = message.get("reasoning_content") or message.get("thinking")
        parts = [Part("thinks", "thought", str(thought)[:PART])] if thought else []
        parts += [Part("says", "policy", text)] if text.strip() else []
    return parts + [Part("calls", "call", _call(name, given)[:PART]) for name, given in tool_calls(message)]


def _call(name: str, given: Any) -> str:
    """Return a call as Python writes it, with its arguments as JSON."""
    if not isinstance(given, dict):
        return f"{name}({json.dumps(given, ensure_ascii=False)})"
    return f"{name}({', '.join(f'{key}={json.dumps(value, ensure_ascii=False)}' for key, value in given.items())})"
