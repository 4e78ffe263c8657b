"""What may stand where a model is to read something: text, or messages."""

from collections.abc import Sequence
from typing import Any

from datasets import Dataset


def is_text(value: Any) -> bool:
    """Whether it is text, which may be empty, or one or more messages."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(message, dict) and "role" in message for message in value)
    return isinstance(value, str)


def has_content(answer: Any) -> bool:
    """Whether text, or one of the messages, says or calls anything."""
    if isinstance(answer, str):
        return bool(answer.strip())
    if not is_text(answer):
        return False
    contents = [message.get("content") for message in answer if not message.get("tool_calls")]
    return len(contents) < len(answer) or any(c.strip() if isinstance(c, str) else c for c in contents)


def check_texts(dataset: Dataset, columns: Sequence[str], name: str, may_be_empty: bool = True) -> None:
    """Check the values of columns that hold text or messages, and of `messages`, that holds messages only.

    Args:
        dataset: rows with these columns.
        columns: their names.
        name: what messages call the dataset.
        may_be_empty: whether a text may be "".

    Raises:
        ValueError: some hold nothing or something else; with their number, the first row and its value.
    """
    for column in columns:
        wanted = "messages" if column == "messages" else "text or messages"
        wrong = [
            (row, value)
            for row, value in enumerate(dataset[column])
            if not is_text(value) or (column == "messages" and isinstance(value, str)) or not (value or may_be_empty)
        ]
        if wrong:
            raise ValueError(
                f"{name}: the column {column!r} must hold {wanted}{'' if may_be_empty else ' that are not empty'}, "
                f"but {len(wrong)} of {len(dataset)} rows do not (the first is row {wrong[0][0]}, with "
                f"{repr(wrong[0][1])[:80]}): correct them, or leave them out with `Dataset.filter`"
            )
