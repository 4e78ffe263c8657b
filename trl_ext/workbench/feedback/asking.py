"""Ask a model the questions that have no answer yet, hold a local model, and refuse settings without effect."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cached_property
from typing import Any


class LocalModel:
    """
    Hold a causal language model on this machine. Its weights are loaded when they are first needed.

    Args:
        path: folder or hub name of the model.
        batch_size: sequences in one batch.
        dtype: dtype of the weights; `auto` is what they were saved in.
        use_cpu: use no GPU, even where there is one.
    """

    def __init__(self, path: str, batch_size: int, dtype: str, use_cpu: bool):
        from ...models import load_tokenizer

        self.path, self.batch_size, self.dtype, self.use_cpu = path, batch_size, dtype, use_cpu
        self.tokenizer = load_tokenizer(path)
        self.is_chat = self.tokenizer.chat_template is not None

    @cached_property
    def model(self) -> Any:
        """Return the model; the first access loads its weights."""
        from ...models import load_model

        return load_model(self.path, "cpu" if self.use_cpu else None, dtype=self.dtype)

    @property
    def context(self) -> float:
        """Return the most tokens that the model can read; infinity if its configuration does not say."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or math.inf


def check_read(settings: Any, names: Sequence[str], other: str) -> None:
    """
    Refuse settings that have no effect, because another setting that they need is None.

    Args:
        settings: a dataclass instance.
        names: names of the settings that need the other one.
        other: name of the setting that they need.

    Raises:
        ValueError: a setting in `names` is not at its default, and `other` is None.
    """
    for each in fields(settings) if getattr(settings, other) is None else ():
        default: Any = each.default_factory() if callable(each.default_factory) else each.default
        if each.name in names and getattr(settings, each.name) != default:
            raise ValueError(
                f"`{each.name}` has an effect only with `{other}`: set `{other}`, or leave `{each.name}` out"
            )


def ask(ask_all: Callable[..., None], journal: Any, questions: list[Any], what: str, url: str | None) -> None:
    """
    Ask the questions that have no answer in the journal yet, with a progress bar.

    Args:
        ask_all: function that asks. It is given the questions, and a function to call with each answer.
        journal: the [`~trl_ext.workbench.feedback.journal.Journal`] that keeps the answers.
        questions: all questions, each with a `name`.
        what: what the progress bar calls the questions.
        url: address of the model, for the error message.

    Raises:
        RuntimeError: the model cannot be reached, or refuses to answer. The answers so far are kept in the journal.
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
            kept = f"{len(journal.rows):,} answers are kept: run the same command again to go on"
            raise RuntimeError(f"the model at {url}: {error}. {kept}") from error
