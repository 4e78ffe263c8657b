"""Ask a model the questions that have no answer yet, load a local model, and check which settings belong to which."""

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
        path: its folder or hub name.
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
        """Return the model with its weights."""
        from ...models import load_model

        return load_model(self.path, "cpu" if self.use_cpu else None, dtype=self.dtype)

    @property
    def context(self) -> float:
        """Return how many tokens the model reads at most; infinity if its configuration does not say."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or math.inf


def check_read(settings: Any, names: Sequence[str], other: str) -> None:
    """
    Refuse settings that have no effect, because another setting that they need is None.

    Args:
        settings: a dataclass instance.
        names: names of the settings that need the other one.
        other: name of the setting that they need.

    Raises:
        ValueError: one of them is not at its default, and `other` is None.
    """
    for each in fields(settings) if getattr(settings, other) is None else ():
        default: Any = each.default_factory() if callable(each.default_factory) else each.default
        if each.name in names and getattr(settings, each.name) != default:
            raise ValueError(f"`{each.name}` has an effect with `{other}` only: set that, or leave it out")


def ask(ask_all: Callable[..., None], journal: Any, questions: list[Any], what: str, url: str | None) -> None:
    """
    Ask the questions that have no answer in the journal yet, with a progress bar.

    Args:
        ask_all: function of the questions to ask, and of a function that it calls with each answer.
        journal: the [`~trl_ext.workbench.feedback.journal.Journal`] that keeps the answers.
        questions: all questions, each with a `name`.
        what: what the progress bar calls them.
        url: address of the model, for the error message.

    Raises:
        RuntimeError: the model cannot be reached, or refuses. The answers so far are kept.
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
