"""Write the page of `trl-ext evaluate`."""

from pathlib import Path
from typing import Any

from ..pages.compare import evaluation_rows
from ..pages.markup import number, render, shown_answer, shown_prompt

_PROMPTS = 10  # prompts that the page shows, each with the answers of all policies


def page(found: dict[str, Any], answers: dict[str, list[dict[str, Any]]]) -> str:
    """
    Return the HTML page of an evaluation.

    Args:
        found: content of `evaluation.json`.
        answers: name of a policy → its answers, each with its `scores`; all policies have the same prompts in order.
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
        settings=found["settings"],
    )


def _side_by_side(rows: tuple[dict[str, Any], ...]) -> list[Any]:
    cells: list[Any] = [shown_prompt(rows[0]["prompt"])]
    for row in rows:
        scores = [f"{name} {number(score, 3)}" for name, score in row["scores"].items()]
        said = [*scores, f"{len(row['completion_ids'])} tokens", *([] if row["finished"] else ["cut off"])]
        cells.append(shown_answer(row["completion"], ", ".join(said)))
    return cells
