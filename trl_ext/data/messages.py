"""Distinguish text from messages, and convert rows of either to the form that trainers expect."""

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

_TEXTS = ("messages", "prompt", "completion", "chosen", "rejected")


def print_on_first(sentence: str) -> None:
    """Print a sentence, only on the first process."""
    if os.environ.get("RANK", "0") == "0":
        print(sentence)


# ---- Messages ----


def is_messages(value: Any) -> bool:
    """Return whether the value is a list of one or more messages."""
    return isinstance(value, list) and bool(value) and all(map(_is_message, value))


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict):
        return False
    says = isinstance(message.get("content"), (str, list)) or message.get("tool_calls")
    return isinstance(message.get("role"), str) and bool(says)


def is_text(value: Any) -> bool:
    """Return whether the value is a text, even an empty one, or a list of one or more messages."""
    return isinstance(value, str) or is_messages(value)


def content_of(message: dict[str, Any]) -> str:
    """Return a message's content as one text; the texts of content blocks are joined by line ends."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(block.get("text") or "" for block in content if isinstance(block, dict))
    return content or ""


def without_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages without a leading system (or developer) message."""
    return messages[messages[0]["role"] in ("system", "developer") :]


def has_content(answer: Any) -> bool:
    """
    Return whether a completion has content. A text has it unless it is blank; messages have it if one of them has text
    or a tool call.
    """
    if isinstance(answer, str):
        return bool(answer.strip())
    return is_text(answer) and any(message.get("tool_calls") or content_of(message).strip() for message in answer)


# ---- Tool calls ----


def tool_calls(message: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return for each tool call in a message two values: the tool's name and the call's arguments."""
    calls = [call.get("function") or call for call in message.get("tool_calls") or []]
    return [(str(call.get("name")), call.get("arguments")) for call in calls]


def repeated_calls(completion: Any) -> list[bool]:
    """
    Return for each tool call in the messages of a `completion` whether an earlier call had the same name, arguments
    and answer. A text has no calls.

    A call that gets another answer than before is not repeated, and neither is a call without an answer.

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


# ---- Rows ----


def rows_of(dataset: "Dataset", columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield these `columns` of each row. Many rows are read at once: `datasets` is slow at reading them one by one."""
    for batch in dataset.select_columns([*columns]).iter(1000):
        yield from (dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True))


def check_texts(dataset: "Dataset", columns: Sequence[str], name: str, may_be_empty: bool = True) -> None:
    """Raise a `ValueError` if a row of these columns holds neither text nor messages.

    Args:
        dataset: rows with these columns. A column named `messages` must hold messages.
        name: name of the dataset for error messages.
        may_be_empty: False refuses a row whose text is "".
    """
    for column in columns:
        is_right = is_messages if column == "messages" else is_text
        for row, value in enumerate(dataset[column][:]):
            if not is_right(value) or not (value or may_be_empty):
                text = "" if column == "messages" else "text or " if may_be_empty else "text (not empty) or "
                raise ValueError(
                    f"{name}, row {row}: {column!r} must be {text}messages (a list of dicts with `role` and "
                    f"`content`), got {repr(value)[:80]}. Correct or remove such rows."
                )


def one_form(dataset: Any, name: str) -> Any:
    """
    Return the rows as [`answers_alone`] does, without the prompts that completions repeat; raise a `ValueError` if
    some rows are text and others messages.

    TRL prepares all rows like the first row. Some mixtures crash it; in others, rows of text get no EOS.

    Args:
        dataset: rows; or a stream, in which texts are not cut and mixtures are not found.
        name: name of the dataset for the sentence that [`answers_alone`] prints, and for the error.
    """
    from datasets import Dataset

    dataset = answers_alone(dataset, name)
    if isinstance(dataset, Dataset):
        columns = [column for column in _TEXTS if column in dataset.column_names]
        kinds = [{*map(type, row.values())} for row in rows_of(dataset, columns)]
        text = [row for row, found in enumerate(kinds) if str in found]
        chat = [row for row, found in enumerate(kinds) if list in found]
        if text and chat:
            raise ValueError(
                f"{name}: some rows are text (first row {text[0]}, {len(text)} in all) and others messages (first row "
                f"{chat[0]}, {len(chat)} in all): write all as text, or all as messages."
            )
    return dataset


def answers_alone(dataset: Any, name: str, columns: Sequence[str] = _TEXTS[1:]) -> Any:
    """
    Remove the prompt from the completions of rows in which all of them repeat it, and print how many rows change.

    A model would otherwise read such a prompt twice. Messages are compared by role and content, without a system
    message at their beginning. A text prompt such as "Hello" may well begin a completion, so texts are changed only if
    most rows' completions begin with their prompts. In a row with both text and messages, the text becomes a message.

    Args:
        dataset: rows, or a stream; in a stream, rows of text are not changed. Anything else is returned unchanged.
        name: name of the dataset for the printed sentence.
        columns: name of the column of prompts, then names of columns of completions; the dataset may lack some of the
            latter. The default is `prompt`, `completion`, `chosen`, `rejected`.
    """
    from datasets import IterableDataset

    found = [column for column in columns if column in (getattr(dataset, "column_names", None) or ())]
    if len(found) < 2 or found[0] != columns[0]:
        return dataset
    also_texts = False
    if not isinstance(dataset, IterableDataset):
        changed = [row for row in rows_of(dataset, found) if _alone(row, found)]
        texts = sum(all(isinstance(value, str) for value in row.values()) for row in changed)
        also_texts = texts * 2 > len(dataset)
        count = len(changed) - (0 if also_texts else texts)
        if not count:
            return dataset
        rows = f"{count:,} of {len(dataset):,} rows"
        print_on_first(f"{name}: in {rows} a prompt is cut from completions, or text becomes a message.")
    return dataset.map(_alone, fn_kwargs={"columns": found, "also_texts": also_texts})


def _alone(row: dict[str, Any], columns: Sequence[str], also_texts: bool = True) -> dict[str, Any]:
    """Return the columns of a row that [`answers_alone`] changes, with their new values."""
    given = [row[column] for column in columns]
    if not all(map(is_text, given)):
        return {}
    if any(isinstance(value, list) for value in given):
        roles = ["user", *["assistant"] * (len(given) - 1)]
        prompt, *completions = (
            [{"role": role, "content": value}] if isinstance(value, str) else value
            for role, value in zip(roles, given, strict=True)
        )
        asked = _turns(prompt)
        if asked and all(_turns(completion)[: len(asked)] == asked for completion in completions):
            if len(asked) == len(prompt):
                end = len(completions[0]) - len(_turns(completions[0])) + len(asked)
                if end > len(prompt):
                    prompt = completions[0][:end]  # with a system message
            completions = [without_system(completion)[len(asked) :] for completion in completions]
    else:
        prompt, *completions = given
        if also_texts and prompt and all(completion.startswith(prompt) for completion in completions):
            completions = [completion[len(prompt) :] for completion in completions]
    new = dict(zip(columns, (prompt, *completions), strict=True))
    return {column: value for column, value in new.items() if value != row[column]}


def _turns(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(message["role"], content_of(message)) for message in without_system(messages)]
