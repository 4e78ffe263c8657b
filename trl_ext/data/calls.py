"""Find the tool calls in messages."""

import itertools
import json
from typing import Any


def tool_calls(message: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the name and the arguments of each tool call of a message."""
    calls = [call.get("function") or call for call in message.get("tool_calls") or []]
    return [(str(call.get("name")), call.get("arguments")) for call in calls]


def repeated_calls(completion: Any) -> list[bool]:
    """
    Return for each tool call of an episode whether an earlier call had the same name, arguments and answer.

    A call that gets another answer than before is no repetition, and neither is a call without an answer.

    >>> move = {"role": "assistant", "tool_calls": [{"function": {"name": "move", "arguments": {"to": "left"}}}]}
    >>> wall = {"role": "tool", "name": "move", "content": "A wall."}
    >>> repeated_calls([move, wall, move, wall])
    [False, True]
    """
    messages = [] if isinstance(completion, str) else completion
    seen: list[str] = []
    repeated = []
    for place, message in enumerate(messages):
        answers = list(itertools.takewhile(lambda later: later.get("role") == "tool", messages[place + 1 :]))
        for name, arguments in tool_calls(message):
            answer = next((each for each in answers if each.get("name") == name), None)
            call = json.dumps([name, arguments, answer and answer.get("content")], sort_keys=True, default=str)
            repeated.append(answer is not None and call in seen)
            seen.append(call)
            if answer is not None:
                answers.remove(answer)
    return repeated


def with_text_arguments(answer: Any) -> Any:
    """
    Return messages with the arguments of each tool call as the JSON text of an object; return a text unchanged.

    A policy may call a tool with any JSON value, but TRL prints only objects, and a table needs one type for each
    column. A value that is no object becomes `{"arguments": value}`.
    """
    if isinstance(answer, str):
        return answer

    def text(arguments: Any) -> str:
        given = arguments if isinstance(arguments, dict) else {"arguments": arguments}
        return json.dumps(given, ensure_ascii=False, default=str)

    def written(message: dict[str, Any]) -> dict[str, Any]:
        if not message.get("tool_calls"):
            return message
        calls = [{"name": name, "arguments": text(arguments)} for name, arguments in tool_calls(message)]
        return {**message, "tool_calls": [{"type": "function", "function": call} for call in calls]}

    return list(map(written, answer))
