"""Read prompts and completions, which are text or messages, as text."""

from typing import Any


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


def recorded(completion: Any) -> str | list[dict[str, Any]]:
    """
    Return a completion in the form that files store: its messages if it has several or a tool call, else its text.
    """
    if isinstance(completion, str) or (len(completion) == 1 and not completion[0].get("tool_calls")):
        return text_of(completion)
    return completion


def well_formed(value: Any) -> Any:
    """
    Replace lone surrogates, which UTF-8 cannot encode, by U+FFFD in a text, or in all texts of a list or mapping.
    """
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {well_formed(key): well_formed(item) for key, item in value.items()}
    return [well_formed(item) for item in value] if isinstance(value, (list, tuple)) else value
