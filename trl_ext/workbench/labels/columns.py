"""Name the columns of a table of labels: the prompt, the answers, the annotator, the choice."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Columns:
    """
    Name the columns of a table of labels.

    Args:
        prompt: the column of the prompt, as text or messages; or several columns of text, which are joined by an empty
            line.
        responses: the columns of the answers, in the order in which they were shown: two, or more if `scores` rank
            them. Give one column if each row has one answer and its score: then the answers that one annotator scored
            for a prompt are compared with each other, in the order of their rows.
        annotator: in a long table (a row for each label) the column of who chose. The default is `annotator`.
        choice: in a long table the column of what was chosen. The default is `choice`.
        annotators: in a wide table (a row for each pair) one column for each annotator, which has the annotator's name
            and holds the choices. Give these instead of `annotator` and `choice`.
        scores: in a long table one column of scores for each of `responses`, in the same order. Give these instead of
            `choice`. The answer with the higher score wins, equal scores are a tie, and an answer without a score is
            not compared. (In a wide table with one answer a row, the columns of `annotators` hold the scores.)
        lowest_wins: whether scores are ranks: 1 is the best.
        values: the values of a choice. The first one means the first answer, the second one the second answer, and all
            further ones a tie.
        item: the column that names the pair; with one column of answers, or more than two, it names the prompt.
            Without it, rows with the same prompt and the same two answers, in any order, are one pair.
        time: in a long table the column of when a label was given, as numbers or dates.
        seconds: in a long table the column of how many seconds a label took.
        confidence: in a long table the column of how sure the annotator was: the higher the number, the surer.
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
                f"give one or more prompt columns and different response columns, got {self.prompt} and "
                f"{self.responses}"
            )
        if len(self.values) < 2 or len({*self.values}) < len(self.values):
            raise ValueError(
                f"values must mean the first answer, the second one and, if there are ties, a tie; got {self.values}"
            )
        has_scores = bool(self.scores) or (bool(self.annotators) and len(self.responses) == 1)
        if self.lowest_wins and not has_scores:
            raise ValueError(
                "lowest_wins is for scores, but no column of scores is named: name them, or leave lowest_wins out"
            )
        if self.annotators:
            for name in ("annotator", "choice", "scores", "time", "seconds", "confidence"):
                if value := getattr(self, name):
                    raise ValueError(
                        f"{name} {value!r} is for a long table, annotators for a wide one: give one of the two"
                    )
            if len(self.responses) > 2:
                raise ValueError(
                    f"a wide table has one or two responses in a row, got {self.responses}: use a long table to rank "
                    "more"
                )
            return
        if self.choice and self.scores:
            raise ValueError(
                f"a label is a choice or a score, but both are given, {self.choice!r} and {self.scores}: leave one out"
            )
        if (self.scores or len(self.responses) != 2) and len(self.scores) != len(self.responses):
            raise ValueError(
                f"scores must name one column for each response, in their order, got {self.scores or 'none'} for "
                f"{self.responses}"
            )
        object.__setattr__(self, "annotator", self.annotator or "annotator")
        if not self.scores:
            object.__setattr__(self, "choice", self.choice or "choice")

    @property
    def names(self) -> list[str]:
        """Return the names of all columns that are read."""
        single = (self.item, self.annotator, self.choice, self.time, self.seconds, self.confidence)
        return [*filter(None, (*self.prompt, *self.responses, *self.annotators, *self.scores, *single))]


def texts_of(row: dict[str, Any], answers: Sequence[Any], columns: Columns) -> tuple[Any, ...]:
    """Return a row's prompt and the `answers` in TRL's form: where the prompt is messages, answers become messages."""
    if len(columns.prompt) == 1:
        prompt = row[columns.prompt[0]]
    else:
        prompt = "\n\n".join(str(row[name]) for name in columns.prompt if row[name] not in (None, ""))
    if isinstance(prompt, list):
        answers = [[{"role": "assistant", "content": a}] if isinstance(a, str) else a for a in answers]
    return prompt, *answers
