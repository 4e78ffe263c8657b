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
        annotator: who chose, in a long table, which has one row for each label. The default is `annotator`.
        choice: what was chosen, in a long table. The default is `choice`.
        annotators: columns of a wide table, which has one row for each pair. A column has an annotator's name and
            holds the choices. They are given instead of `annotator` and `choice`.
        scores: columns with a score for each answer, in the order of `responses`, given instead of `choice`. The
            higher score wins, equal ones are a tie, and an answer without a score is not compared. In a wide table
            with one answer a row the columns of `annotators` hold the scores.
        lowest_wins: whether scores are ranks, 1 the best.
        values: values of a choice that mean the first answer, the second, and (all further ones) a tie.
        item: name of the pair, or of the prompt where more than two answers are ranked. If not given, the same prompt
            with the same two answers is one pair, in any order.
        time: when a label was given, as numbers or dates; in a long table.
        seconds: how long a label took; in a long table.
        confidence: how sure the annotator was: any number that grows with it; in a long table.
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
