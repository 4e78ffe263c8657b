"""Check that data holds what models read: text or messages."""

from collections.abc import Sequence
from typing import Any

from datasets import Dataset

_TEXTS = ("messages", "prompt", "completion", "chosen", "rejected")


def is_messages(value: Any) -> bool:
    """Return whether the value is a list of one or more messages."""
    return isinstance(value, list) and bool(value) and all(map(_is_message, value))


def is_text(value: Any) -> bool:
    """Return whether the value is a text, even an empty one, or a list of one or more messages."""
    return isinstance(value, str) or is_messages(value)


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict):
        return False
    says = isinstance(message.get("content"), (str, list)) or message.get("tool_calls")
    return isinstance(message.get("role"), str) and bool(says)


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
    if not is_text(answer):
        return False
    contents = [message.get("content") for message in answer if not message.get("tool_calls")]
    return len(contents) < len(answer) or any(c.strip() if isinstance(c, str) else c for c in contents)


def check_texts(dataset: Dataset, columns: Sequence[str], name: str, may_be_empty: bool = True) -> None:
    """Check that columns hold text or messages; a column named `messages` must hold messages.

    Args:
        dataset: rows with these columns.
        columns: names of the columns to check.
        name: what error messages call the dataset.
        may_be_empty: False refuses a row whose text is "".

    Raises:
        ValueError: some rows hold something else. The message says how many, and has the first one's number and value.
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


def check_chat_template(dataset: Dataset, name: str, tokenizer_name: str, **kwargs: Any) -> None:
    """Check that a tokenizer can write the data's messages, if there are any, as text.

    Args:
        dataset: its first row is checked.
        name: what error messages call the dataset.
        tokenizer_name: a folder or a hub name. It is loaded only if there are messages.
        **kwargs: for `from_pretrained`.

    Raises:
        ValueError: there are messages, but the tokenizer has no chat template.
    """
    columns = [column for column in _TEXTS if column in dataset.column_names]
    messages = [column for column in columns if len(dataset) and is_messages(dataset[0][column])]
    if not messages:
        return
    from ..models import load_tokenizer

    if load_tokenizer(tokenizer_name, **kwargs).chat_template is None:
        raise ValueError(
            f"{name}: the column {messages[0]!r} holds messages, but the tokenizer of {tokenizer_name} has no chat "
            "template to write them as text: start from an instruction-tuned model, or give the data as text"
        )
