"""Bring rows into the form that trainers read: all text or all messages, and answers without their prompt."""

import os
from collections.abc import Sequence
from typing import Any

from datasets import Dataset, IterableDataset

from .texts import content_of, is_text, without_system

_COLUMNS = ("prompt", "completion", "chosen", "rejected")
_SHOWN = 5


def say(sentence: str) -> None:
    """Print a sentence, of several processes on the first alone."""
    if os.environ.get("RANK", "0") == "0":
        print(sentence)


def one_form(dataset: Any, name: str) -> Any:
    """
    Return rows as [`answers_alone`] does, and refuse a mix of rows of text and rows of messages.

    TRL prepares all rows as the first one: some mixes crash it, and in others rows of text get no EOS.

    Raises:
        ValueError: some rows are text and others messages. The message has their numbers.
    """
    dataset = answers_alone(dataset, name)
    check_one_kind(dataset, _COLUMNS, name)
    return dataset


def check_one_kind(dataset: Any, columns: Sequence[str], name: str) -> None:
    """Raise a `ValueError` if some rows are text and others messages; other data than a `Dataset` is not checked."""
    if not isinstance(dataset, Dataset):
        return
    read = dataset.select_columns([column for column in columns if column in dataset.column_names])
    kinds = [{type(value) for value in row.values()} for row in read]
    text, chat = ([row for row, found in enumerate(kinds) if kind in found] for kind in (str, list))
    if text and chat:
        texts, chats = (f"{len(i)} (rows {str(i[:_SHOWN])[1:-1]}{', …' * (len(i) > _SHOWN)})" for i in (text, chat))
        raise ValueError(
            f"{name}: of {len(kinds)} rows, {texts} are text and {chats} are messages: write all as text, or all as "
            "messages"
        )


def answers_alone(dataset: Any, name: str, columns: Sequence[str] = _COLUMNS) -> Any:
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
    if isinstance(dataset, IterableDataset):
        return dataset.map(_alone, fn_kwargs={"columns": found, "also_texts": False})
    cut_texts = cut_messages = mixed = 0
    for row in dataset.select_columns(found):
        if new := _alone(row, found):
            is_cut = any(type(new[column]) is type(row[column]) for column in found[1:] if column in new)
            is_chat = any(isinstance(value, list) for value in row.values())
            cut_texts, cut_messages = cut_texts + (not is_chat), cut_messages + (is_chat and is_cut)
            mixed += not is_cut
    also_texts = cut_texts * 2 > len(dataset)
    if cut := cut_messages + also_texts * cut_texts:
        say(f"{name}: in {cut:,} of {len(dataset):,} rows the answers begin with the prompt, which is taken off them.")
    if mixed:
        say(f"{name}: {mixed:,} of {len(dataset):,} rows have text beside messages; it is read as a message.")
    return dataset.map(_alone, fn_kwargs={"columns": found, "also_texts": also_texts}) if cut or mixed else dataset


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
