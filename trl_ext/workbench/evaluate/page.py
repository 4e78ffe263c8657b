"""Write the page of `trl-ext evaluate`."""

from pathlib import Path
from typing import Any

from ..pages.conversation import shown_answer
from ..pages.evaluation import evaluation_rows
from ..pages.markup import number, render

_PROMPTS = 10  # shown with each policy's answer
_TEXT = 400  # characters of a prompt


def page(found: dict[str, Any], answers: dict[str, list[dict[str, Any]]]) -> str:
    """
    Return the HTML page of an evaluation.

    Args:
        found: what `evaluation.json` has.
        answers: name of each policy → its answers, with their `scores`.
    """
    return render(
        Path(__file__).with_name("page.html.j2"),
        title="Evaluation",
        tiles={
            "prompts": number(found["prompts"]),
            "baseline": found["baseline"],
            "reference": Path(found["reference"]).name,
            "judge": found["judge"] or "none",
        },
        notes=found["notes"],
        names=list(found["policies"]),
        figures=evaluation_rows(list(found["policies"].values())),
        answers=[_side_by_side(rows) for rows in list(zip(*answers.values(), strict=True))[:_PROMPTS]],
        settings=[[name, str(value)] for name, value in found["settings"].items()],
    )


def _side_by_side(rows: tuple[dict[str, Any], ...]) -> list[Any]:
    asked = rows[0]["prompt"]
    text = asked if isinstance(asked, str) else "\n".join(f"{turn['role']}: {turn['content']}" for turn in asked)
    cells: list[Any] = [text[-_TEXT:]]
    for row in rows:
        scores = [f"{name} {number(score, 3)}" for name, score in row["scores"].items()]
        said = [*scores, f"{len(row['completion_ids'])} tokens", *([] if row["finished"] else ["cut off"])]
        cells.append({"answer": shown_answer(row["completion"]), "said": ", ".join(said)})
    return cells
