"""Ask a model what is still to be asked, and check settings that only one kind of model reads."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any


def check_read(settings: Any, names: Sequence[str], other: str) -> None:
    """
    Raise if a setting is given that is read with another one alone, which is not given.

    Args:
        settings: a dataclass instance.
        names: of settings.
        other: name of the setting without which they are not read.
    """
    for each in fields(settings) if getattr(settings, other) is None else ():
        default: Any = each.default_factory() if callable(each.default_factory) else each.default
        if each.name in names and getattr(settings, each.name) != default:
            raise ValueError(f"`{each.name}` is read with `{other}` alone: set that, or leave it out")


def ask(ask_all: Callable[..., None], journal: Any, questions: list[Any], what: str, url: str | None) -> None:
    """
    Ask what the journal does not have yet, and show how far it is.

    Args:
        ask_all: called with the questions, and with what is to be called with each answer.
        journal: where answers are kept.
        questions: all of them, each with a `name`.
        what: what the bar calls them.
        url: of the model, for the message.

    Raises:
        RuntimeError: the model cannot be asked; what was answered is kept.
    """
    from tqdm.auto import tqdm

    from ...rewards import ServiceError

    missing = journal.missing(questions)
    whys: Counter[str] = Counter()
    with tqdm(total=len(missing), desc=what, unit="call", disable=not missing) as bar:

        def done(row: dict[str, Any]) -> None:
            journal.add(row)
            whys[row["why"]] += 1
            bar.set_postfix({why: count for why, count in whys.items() if why != "read"}, refresh=False)
            bar.update()

        try:
            ask_all(missing, done)
        except ServiceError as error:
            kept = f"{len(journal.rows):,} answers are kept: the same command goes on"
            raise RuntimeError(f"the model at {url}: {error}. {kept}") from error
