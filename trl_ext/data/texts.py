"""What models read, text or messages: tell them apart, and bring rows into the form that trainers take."""

import os
from collections.abc import Sequence
from typing import Any

from datasets import Dataset, IterableDataset

_TEXTS = ("messages", "prompt", "completion", "chosen", "rejected")


def say(sentence: str) -> None:
    """Print a sentence, of several processes on the first alone."""
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
    """Return a message's content as one text; of blocks, the texts' lines."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(block.get("text") or "" for block in content if isinstance(block, dict))
    return content or ""


def without_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages without the system message that they may begin with."""
    return messages[messages[0]["role"] in ("system", "developer") :]


def has_content(answer: Any) -> bool:
    """Return whether the text, or one of the messages, says anything or calls a tool."""
    if isinstance(answer, str):
        return bool(answer.strip())
    return is_text(answer) and any(message.get("tool_calls") or content_of(message).strip() for message in answer)


# ---- Rows ----


def check_texts(dataset: Dataset, columns: Sequence[str], name: str, may_be_empty: bool = True) -> None:
    """Raise a `ValueError` if a row of these columns holds neither text nor messages.

    Args:
        dataset: rows with these columns. A column named `messages` must hold messages.
        columns: names of the columns to check.
        name: what error messages call the dataset.
        may_be_empty: False refuses a row whose text is "".
    """
    for column in columns:
        is_right = is_messages if column == "messages" else is_text
        for row, value in enumerate(dataset[column]):
            if not is_right(value) or not (value or may_be_empty):
                raise ValueError(
                    f"{name}, row {row}: {column!r} must be text or messages, got {repr(value)[:80]}. Correct such "
                    "rows, or leave them out with `Dataset.filter`."
                )


def answers_alone(dataset: Any, name: str, columns: Sequence[str] = _TEXTS[1:]) -> Any:
    """
    Return rows without the prompt at the beginning of the answers, and say in how many rows it was there.

    A model would read such a prompt twice. Messages are compared by role and content, and may have a system message on
    one side alone. A text prompt such as "Hello" may well begin an answer, so texts are changed only if most rows'
    answers begin with their prompts. In a row with both text and messages, the text becomes a message.

    Args:
        dataset: rows, or a stream. In a stream only messages are changed. Anything else is returned unchanged.
        name: what the sentence calls the rows.
        columns: name of the prompts' column, then those of answers.
    """
    found = [column for column in columns if column in (getattr(dataset, "column_names", None) or ())]
    if len(found) < 2 or found[0] != columns[0]:
        return dataset
    also_texts = False
    if not isinstance(dataset, IterableDataset):
        changed = [row for row in dataset.select_columns(found) if _alone(row, found)]
        texts = sum(all(isinstance(value, str) for value in row.values()) for row in changed)
        also_texts = texts * 2 > len(dataset)
        count = len(changed) - (0 if also_texts else texts)
        if not count:
            return dataset
        say(
            f"{name}: in {count:,} of {len(dataset):,} rows the prompt is taken off the answers, or text is a message."
        )
    return dataset.map(_alone, fn_kwargs={"columns": found, "also_texts": also_texts})


def _alone(row: dict[str, Any], columns: Sequence[str], also_texts: bool = True) -> dict[str, Any]:
    """Return those columns of a row that change."""
    given = [row[column] for column in columns]
    if not all(map(is_text, given)):
        return {}
    if any(isinstance(value, list) for value in given):
        roles = ["user", *["assistant"] * (len(given) - 1)]
        prompt, *answers = (
            [{"role": role, "content": value}] if isinstance(value, str) else value
            for role, value in zip(roles, given, strict=True)
        )
        asked = _turns(prompt)
        if asked and all(_turns(answer)[: len(asked)] == asked for answer in answers):
            if len(asked) == len(prompt) < (end := len(answers[0]) - len(_turns(answers[0])) + len(asked)):
                prompt = answers[0][:end]  # with a system message
            answers = [without_system(answer)[len(asked) :] for answer in answers]
    else:
        prompt, *answers = given
        if also_texts and prompt and all(answer.startswith(prompt) for answer in answers):
            answers = [answer[len(prompt) :] for answer in answers]
    new = dict(zip(columns, (prompt, *answers), strict=True))
    return {column: value for column, value in new.items() if value != row[column]}


def _turns(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(message["role"], content_of(message)) for message in without_system(messages)]
