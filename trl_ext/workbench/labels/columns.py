"""Name the columns of a table of labels: the prompt, the answers, the annotator, the choice."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Columns:
    """
    Name the columns of a table of labels.

    Args:
        prompt: one column, text or messages, or several with text, which are joined by an empty line.
        responses: the answers, in the order in which they were shown: two, or more that are ranked by `scores`. One if
            each row has one answer and its score: those that an annotator scored for a prompt are compared then, in
            the order of their rows.
        annotator: who chose, in a long table, which has one row a label; `annotator` if not given.
        choice: what was chosen, in a long table; `choice` if not given.
        annotators: columns of a wide table, which has one row a pair; each holds the choices of the annotator that it
            is named after. They take the place of `annotator` and `choice`.
        scores: columns with a score for each answer, in the order of `responses`. They take the place of `choice`: the
            higher score wins, equal ones are a tie, and an answer without one is not compared. In a wide table with
            one answer a row they are the columns of `annotators`.
        lowest_wins: scores are ranks, and 1 is the best.
        values: what stands for the first answer, for the second, and all others for a tie.
        item: what names a pair, or, where more than two answers are ranked, the prompt. If not given, the same prompt
            with the same two answers is one pair, in any order.
        time: when a label was given, of a long table: numbers or dates.
        seconds: how long it took, of a long table.
        confidence: how sure the annotator was, of a long table: any number that grows with it.
    """

    prompt: tuple[str, ...] = ("prompt",)
    responses: tuple[str, ...] = ("response_a", "response_b")
    annotator: str | None = None
    choice: str | None = None
    annotators: tuple[str, ...] = ()
    scores: tuple[str, ...] = ()
    lowest_wins: bool = False
    values: tuple[str, ...] = ("a", "b", "tie")
    item: str | None = None
    time: str | None = None
    seconds: str | None = None
    confidence: str | None = None

    def __post_init__(self) -> None:
        if not self.prompt or not self.responses or len({*self.responses}) < len(self.responses):
            raise ValueError(
                f"one prompt or more and different responses are needed, got {self.prompt}, {self.responses}"
            )
        if len(self.values) < 2 or len({*self.values}) < len(self.values):
            raise ValueError(f"values must be first, second and, if there are ties, those; got {self.values}")
        has_scores = bool(self.scores) or (bool(self.annotators) and len(self.responses) == 1)
        if self.lowest_wins and not has_scores:
            raise ValueError("lowest_wins is for scores, and there are none: name their columns, or leave it out")
        if self.annotators:
            for name in ("annotator", "choice", "scores", "time", "seconds", "confidence"):
                if value := getattr(self, name):
                    raise ValueError(
                        f"{name} {value!r} is for a long table, annotators for a wide one: give one of both"
                    )
            if len(self.responses) > 2:
                raise ValueError(
                    f"a wide table has one or two responses a row, got {self.responses}: rank more in a long one"
                )
            return
        if self.choice and self.scores:
            raise ValueError(
                f"a label is a choice or scores, but both are given, {self.choice!r} and {self.scores}: drop one"
            )
        if (self.scores or len(self.responses) != 2) and len(self.scores) != len(self.responses):
            raise ValueError(
                "scores must be a column for each of the responses, in their order, got "
                f"{self.scores or 'none'} for {self.responses}"
            )
        object.__setattr__(self, "annotator", self.annotator or "annotator")
        if not self.scores:
            object.__setattr__(self, "choice", self.choice or "choice")

    @property
    def names(self) -> list[str]:
        """Return all columns that are read."""
        single = (self.item, self.annotator, self.choice, self.time, self.seconds, self.confidence)
        return [*filter(None, (*self.prompt, *self.responses, *self.annotators, *self.scores, *single))]


def texts_of(row: dict[str, Any], answers: Sequence[Any], columns: Columns) -> tuple[Any, ...]:
    """Return the prompt of a row and two answers as TRL takes them: as messages if the prompt is messages."""
    if len(columns.prompt) == 1:
        prompt = row[columns.prompt[0]]
    else:
        prompt = "\n\n".join(str(row[name]) for name in columns.prompt if row[name] not in (None, ""))
    if isinstance(prompt, list):
        answers = [[{"role": "assistant", "content": a}] if isinstance(a, str) else a for a in answers]
    return prompt, *answers
