"""Write a page that compares runs: their curves in common charts, their results, and their different settings."""

import os
import re
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from typing import Any

from ...callbacks import curve, draw_line
from .charts import GROUPS, INK, chart, line_style
from .markup import percent, render, shown_answer, shown_scores, with_error, with_interval
from .page import alarms, results, runbook, sentence, watched
from .recorded import Run, headline

PROMPTS = 5  # shown with each run's answer
FOLDERS = {"output_dir", "logging_dir"}  # they differ in any two runs


def named(folders: list[Path]) -> dict[str, Path]:
    """Map names to folders. A name is the folder's path below the innermost folder that contains all of them."""
    paths = [folder.resolve() for folder in folders]
    above = os.path.commonpath([path.parent for path in paths])
    return {path.relative_to(above).as_posix(): folder for path, folder in zip(paths, folders, strict=True)}


def comparison(runs: dict[str, Run], title: str, evaluation: dict[str, Any] | None = None) -> str:
    """
    Return the HTML of a page that compares several runs.

    Args:
        runs: maps the name that the page shows for a run to the run.
        title: the page's title.
        evaluation: content of the `evaluation.json` that `trl-ext evaluate` wrote for these runs, if there is one.
    """
    evaluated = of_runs(evaluation, runs) if evaluation else {}
    samples = {name: run.samples for name, run in runs.items() if run.samples}
    return render(
        "comparison.html.j2",
        title=title,
        verdict=sentence("; ".join(f"in {name} {said}" for name, run in runs.items() if (said := watched(run)))),
        runs=runs,
        objections=[f"{name}: {objection}" for name, run in runs.items() for objection in run.objections],
        summary=side_by_side([results(run) for run in runs.values()]),
        colours={name: line_style(place)["color"].replace(INK, "currentColor") for place, name in enumerate(runs)},
        evaluation=evaluation,
        evaluated=evaluation_rows([evaluated.get(name) for name in runs]),
        curves=_curves(runs),
        settings=_settings(runs),
        watched={name: sentence(watched(run)) for name, run in runs.items()},
        with_samples=list(samples),
        samples=_same_prompts(samples) if len(samples) > 1 else [],
        runbook=runbook(alert for run in runs.values() for alert in run.alerts),
    )


def side_by_side(cells: list[dict[str, str]]) -> list[list[str]]:
    """Return a table row for each label: the label, then its cell in each dict of `cells`, or a dash."""
    labels = dict.fromkeys(label for of in sorted(cells, key=len, reverse=True) for label in of)
    return [[label, *(of.get(label, "–") for of in cells)] for label in labels]


def _curves(runs: dict[str, Run]) -> list[str]:
    """Return charts, each with all runs: the main quantities, and other known metrics that two or more runs logged."""
    shown: dict[str, dict[str, str]] = defaultdict(dict)  # title → run → key
    for name, run in runs.items():
        for label, key in headline(run).items():
            shown[label][name] = key
    main = {key for of in shown.values() for key in of.values()}
    for key, times in sorted(Counter(key for run in runs.values() for key in run.keys).items()):
        if times > 1 and key not in main and any(re.fullmatch(pattern, key) for pattern in GROUPS.values()):
            shown[key] = dict.fromkeys(runs, key)

    def draw(axes, keys):
        for place, (name, run) in enumerate(runs.items()):
            steps, values = curve(run.history, keys.get(name))
            points = [{"step": at, "y": y} for at, y in zip(steps, values, strict=True)]
            # Dots would hide how a line is broken
            draw_line(axes, points, "y", name, **line_style(place), marker="" if len(points) > 1 else ".")
            marks = [alert["step"] for alert in alarms(run) if points]
            foot = {"transform": axes.get_xaxis_transform(), "clip_on": False}
            if marks:  # no marks that are not clipped would reserve room below the chart
                axes.plot(marks, [0.03] * len(marks), "^", color=line_style(place)["color"], **foot)

    return [chart(title, partial(draw, keys=keys)) for title, keys in shown.items()]


def _settings(runs: dict[str, Run]) -> list[list[str]] | None:
    """
    Return a table row for each setting that differs: its name, then its value in each run, or a dash. Return None if
    fewer than two runs recorded their settings.
    """
    monitors = {name for run in runs.values() for name in run.monitors or {}}
    recorded = {
        name: {"trainer": run.trainer, **run.config, **(run.monitors or {})}
        for name, run in runs.items()
        if run.config
    }
    if len(recorded) < 2:
        return None
    rows = []
    for key in sorted(set().union(*recorded.values()) - FOLDERS):
        values = {name: str(of[key])[:200] for name, of in recorded.items() if key in of}
        # A monitor that a run lacks is a difference between runs; a setting that a run's trainer lacks is not
        if len({*values.values()}) > 1 or (key in monitors and len(values) < len(recorded)):
            rows.append([key, *(values.get(name, "–") for name in runs)])
    return rows


def _same_prompts(samples: dict[str, list[dict[str, Any]]]) -> list[list[Any]]:
    """Return table rows of the 5 latest prompts that all runs answered: the prompt, then each run's last answer."""
    last = [{str(row["prompt"]): row for row in rows} for rows in samples.values()]
    shared = set.intersection(*map(set, last))
    latest = sorted(shared, key=lambda prompt: (-min(answers[prompt]["step"] for answers in last), prompt))
    return [
        [prompt[:400]]
        + [
            shown_answer(row["completion"], f"step {row['step']}: {shown_scores(row['scores'])}")
            for row in (answers[prompt] for answers in last)
        ]
        for prompt in latest[:PROMPTS]
    ]


# ---- The figures of `trl-ext evaluate` ----


def evaluation_rows(policies: list[dict[str, Any] | None]) -> list[list[str]]:
    """
    Return the figures of an evaluation as rows of a table: a label, then a cell for each policy.

    Args:
        policies: each policy's entry in an `evaluation.json`; for None, the column has dashes.
    """
    return side_by_side([_cells(policy) if policy else {} for policy in policies])


def _cells(policy: dict[str, Any]) -> dict[str, str]:
    wins = policy["win_rates"].items()
    return {
        **{f"score by {name}": _mean(of) for name, of in policy["rewards"].items()},
        **{f"wins by {name}": with_interval(of["win_rate"], of["interval"]) for name, of in wins},
        "KL to the reference, nats per answer": _mean(policy["kl"]),
        "length, tokens": _mean(policy["length"]),
        "cut off": percent(policy["cut_off"]),
        "different 3-grams of all": percent(policy["distinct_3"]),
        "3-grams repeated within an answer": percent(policy["repeated"]),
    }


def _mean(of: dict[str, Any] | None) -> str:
    return "–" if of is None or of["mean"] is None else with_error(of["mean"], of["standard_error"])


def of_runs(evaluation: dict[str, Any], runs: dict[str, Run]) -> dict[str, Any]:
    """
    Return each run's figures in an evaluation, by the run's name; a run without figures is left out.

    The figures of a checkpoint count as those of its run.
    """
    found: dict[Path, Any] = {}
    for policy in evaluation["policies"].values():
        folder = Path(policy["policy"])
        found.setdefault(folder.parent if folder.name.startswith("checkpoint-") else folder, policy)
    folders = {name: run.folder.resolve() for name, run in runs.items()}
    return {name: found[folder] for name, folder in folders.items() if folder in found}
