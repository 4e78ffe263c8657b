"""Which column of a table of labels holds what."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Columns:
    """
    Which column of a table holds what.

    Args:
        prompt: one column, text or messages, or several with text, which are joined by an empty line.
        responses: the two answers, in the order in which they were shown.
        annotator: who chose, in a long table, which has one row a label; `annotator` if not given.
        choice: what was chosen, in a long table; `choice` if not given.
        annotators: columns of a wide table, which has one row a pair; each holds the choices of the annotator that it
            is named after. They take the place of `annotator` and `choice`.
        scores: two columns of a long table with a score for each answer. They take the place of `choice`: the higher
            score wins, equal ones are a tie.
        values: what stands for the first answer, for the second, and all others for a tie.
        item: what names a pair. If not given, the same prompt with the same two answers is one pair, in any order.
        time: when a label was given, of a long table: numbers or dates.
        seconds: how long it took, of a long table.
        confidence: how sure the annotator was, of a long table: any number that grows with it.
    """

    prompt: tuple[str, ...] = ("prompt",)
    responses: tuple[str, str] = ("response_a", "response_b")
    annotator: str | None = None
    choice: str | None = None
    annotators: tuple[str, ...] = ()
    scores: tuple[str, ...] = ()
    values: tuple[str, ...] = ("a", "b", "tie")
    item: str | None = None
    time: str | None = None
    seconds: str | None = None
    confidence: str | None = None

    def __post_init__(self) -> None:
        if not self.prompt or len(self.responses) != 2:
            raise ValueError(f"one prompt or more and two responses are needed, got {self.prompt}, {self.responses}")
        if len(self.values) < 2 or len({*self.values}) < len(self.values):
            raise ValueError(f"values must be first, second and, if there are ties, those; got {self.values}")
        if self.annotators:
            for name in ("annotator", "choice", "scores", "time", "seconds", "confidence"):
                if value := getattr(self, name):
                    raise ValueError(
                        f"{name} {value!r} is of a long table, annotators of a wide one: give one of both"
                    )
            return
        if self.choice and self.scores:
            raise ValueError(
                f"a label is a choice or two scores, but both are given, {self.choice!r} and {self.scores}: drop one"
            )
        if self.scores and len(self.scores) != 2:
            raise ValueError(f"scores must be two columns, in the order of the responses, got {self.scores}")
        object.__setattr__(self, "annotator", self.annotator or "annotator")
        if not self.scores:
            object.__setattr__(self, "choice", self.choice or "choice")

    @property
    def names(self) -> list[str]:
        """All columns that are read."""
        single = (self.item, self.annotator, self.choice, self.time, self.seconds, self.confidence)
        return [*filter(None, (*self.prompt, *self.responses, *self.annotators, *self.scores, *single))]


def texts_of(row: dict[str, Any], columns: Columns) -> tuple[Any, Any, Any]:
    """Prompt and the two answers of a row as TRL takes them: where the prompt is messages, so are the answers."""
    if len(columns.prompt) == 1:
        prompt = row[columns.prompt[0]]
    else:
        prompt = "\n\n".join(str(row[name]) for name in columns.prompt if row[name] not in (None, ""))
    answers = [row[name] for name in columns.responses]
    if isinstance(prompt, list):
        answers = [[{"role": "assistant", "content": a}] if isinstance(a, str) else a for a in answers]
    return prompt, *answers
