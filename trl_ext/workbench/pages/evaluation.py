"""Show the figures that `trl-ext evaluate` writes, as rows of a table with a column for each policy."""

import json
from pathlib import Path
from typing import Any

from .markup import number, percent, with_error, with_interval


def read_evaluation(path: Path) -> dict[str, Any]:
    """
    Return the content of an `evaluation.json`.

    Args:
        path: the file, or the folder that it is in.

    Raises:
        ValueError: the file cannot be read, or has other content.
    """
    path = path / "evaluation.json" if path.is_dir() else path
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found["policies"], dict) and isinstance(found["baseline"], str):
            return found
        raise ValueError("`policies` or `baseline` has the wrong type")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{path} cannot be read as an evaluation ({type(error).__name__}: {error}): give the "
            "evaluation.json of `trl-ext evaluate`"
        ) from error


def evaluation_rows(policies: list[dict[str, Any] | None]) -> list[list[str]]:
    """
    Return the figures of an evaluation as rows of a table: a label, then a cell for each policy.

    Args:
        policies: each policy's entry in an `evaluation.json`; None makes a column of dashes.
    """
    shown: dict[str, dict[int, str]] = {}
    found = [(place, _cells(policy)) for place, policy in enumerate(policies) if policy]
    for place, cells in sorted(found, key=lambda each: -len(each[1])):  # policies with win rates first
        for label, cell in cells:
            shown.setdefault(label, {})[place] = cell
    return [[label, *(cells.get(place, "–") for place in range(len(policies)))] for label, cells in shown.items()]


def policies_of_runs(evaluation: dict[str, Any], folders: list[Path]) -> list[dict[str, Any] | None]:
    """
    Return the entry of each run's folder in an evaluation; None for a run without one.

    A checkpoint's entry counts as its run's.

    Raises:
        ValueError: no run has an entry.
    """
    by_folder: dict[Path, dict[str, Any]] = {}
    for policy in evaluation["policies"].values():
        folder = Path(policy["policy"])
        by_folder.setdefault(folder.parent if folder.name.startswith("checkpoint-") else folder, policy)
    found = [by_folder.get(folder.resolve()) for folder in folders]
    if not any(found):
        evaluated = ", ".join(policy["policy"] for policy in evaluation["policies"].values())
        raise ValueError(
            f"the evaluation is of {evaluated}, but of none of these runs: give the evaluation of these runs"
        )
    return found


def _cells(policy: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        *((f"score by {name}", _mean(of)) for name, of in policy["rewards"].items()),
        *(
            (f"wins by {name}", with_interval(of["win_rate"], of["interval"]))
            for name, of in policy["win_rates"].items()
        ),
        ("KL to the reference, nats per answer", _mean(policy["kl"])),
        ("length, tokens", _mean(policy["length"])),
        ("cut off", percent(policy["cut_off"])),
        ("different 3-grams of all", percent(policy["distinct_3"])),
        ("3-grams repeated within an answer", percent(policy["repeated"])),
        ("self-BLEU", number(policy.get("self_bleu"), 3)),
    ]


def _mean(of: dict[str, Any] | None) -> str:
    if of is None or of["mean"] is None:
        return "–"
    return with_error(of["mean"], of["standard_error"])
