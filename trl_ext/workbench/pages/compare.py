"""Write a page that compares runs: their curves in common charts, their results, and their different settings."""

import json
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...callbacks import curve, draw_line
from ...runs import is_notice
from .charts import GROUPS, INK, can_draw, chart, line_style, logged_once
from .conversation import shown_answer
from .evaluation import evaluation_rows, policies_of_runs
from .headline import ends, headline
from .markup import TEMPLATES, number, render
from .page import alerts, shown_scores
from .recorded import Run
from .runbook import what_to_do
from .verdict import not_passed, verdict_of_several

PROMPTS = 5  # shown with each run's answer
FOLDERS = {"output_dir", "logging_dir"}  # they differ in any two runs


def named(folders: list[Path]) -> dict[str, Path]:
    """
    Return name → folder. A name is the last parts of the folder's path, as few as make all names differ.

    Raises:
        ValueError: a folder is given twice.
    """
    paths = [folder.resolve() for folder in folders]
    for place, path in enumerate(paths):
        if path in paths[:place]:
            raise ValueError(f"{folders[place]} is given twice; give each run once")
    longest = max(len(path.parts) for path in paths)
    for parts in range(1, longest + 1):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return dict(zip(names, folders, strict=True))


def comparison(
    runs: dict[str, Run], x: str = "step", title: str = "", evaluation: dict[str, Any] | None = None
) -> str:
    """
    Return the HTML of a page that compares several runs.

    Args:
        runs: mapping from the name to show to the run.
        x: quantity on the horizontal axis: `step`, or a key that every run logs and that grows, such as `episode`.
        title: the page's title; by default the runs' names.
        evaluation: content of the `evaluation.json` that `trl-ext evaluate` wrote for these runs.
    """
    progress = {name: _progress(run, x) for name, run in runs.items()}
    colours = {name: line_style(place)["color"] for place, name in enumerate(runs)}
    with_samples = {name: run for name, run in runs.items() if run.samples}
    folders = [run.folder for run in runs.values()]
    found = policies_of_runs(evaluation, folders) if evaluation else []
    found_alerts, silent = {name: alerts(run) for name, run in runs.items()}, defaultdict(list)
    for name, of in found_alerts.items():
        if not of["rows"]:
            silent[of["otherwise"]].append(name)
    settings, own_settings = _settings(runs)
    drawn, points = _curves(runs, progress, x) if can_draw() else (None, [])
    return render(
        TEMPLATES / "comparison.html.j2",
        title=title or " · ".join(runs),
        verdict=verdict_of_several(runs, {name: of for name, of in zip(runs, found, strict=False) if of}),
        not_passed=not_passed(runs),
        names=list(runs),
        summary=_summary(runs),
        colours={name: "currentColor" if colour == INK else colour for name, colour in colours.items()},
        other_axis=_other_axis(runs, x),
        has_alarms=any(map(_alarms, runs.values())),
        evaluation=evaluation,
        evaluated=evaluation_rows(found),
        curves=drawn,
        points=points,
        settings=settings,
        own_settings=own_settings,
        alerts=found_alerts,
        no_alerts=[f"{', '.join(names)}: {sentence}" for sentence, names in silent.items()],
        with_samples=list(with_samples),
        without_samples=", ".join(name for name in runs if name not in with_samples),
        samples=_samples(with_samples) if len(with_samples) > 1 else [],
        what_to_do=what_to_do(alert for run in runs.values() for alert in run.alerts),
    )


def _alarms(run: Run) -> list[int]:
    """Return the step of each alert of a run; notices do not count."""
    return [alert["step"] for alert in run.alerts if not is_notice(alert)]


def _progress(run: Run, x: str) -> Callable[[list[int]], list[float]]:
    """
    Return a function that turns optimizer steps into values of the key `x`, interpolated between logged steps.

    Raises:
        ValueError: the run logs no `x`.
    """
    if x == "step":
        return lambda steps: list(map(float, steps))
    steps, values = curve(run.history, x)
    if not steps:
        raise ValueError(f"{run.folder} has no {x!r} in its logs; choose `--x step`, or a key that every run logs")
    return lambda asked: np.interp(asked, [0, *steps], [0.0, *values]).tolist()


def _other_axis(runs: dict[str, Run], x: str) -> str:
    """
    Return a key that suits the horizontal axis better than `step`, or "".

    That is `episode` or `num_tokens`, if all runs log it and one run covers over 10 % more of it a step than another.
    """
    for key in ("episode", "num_tokens") if x == "step" else ():
        per_run = [curve(run.history, key) for run in runs.values()]
        if all(steps and values == sorted(values) for steps, values in per_run):
            ratios = [values[-1] / max(steps[-1], 1) for steps, values in per_run]
            if max(ratios) > 1.1 * min(ratios):
                return key
    return ""


def _summary(runs: dict[str, Run]) -> list[list[str]]:
    """Return the rows of the table of results: a label, then a cell for each run."""
    shown: dict[str, dict[str, str]] = {}  # label → run → value
    for name, run in runs.items():
        for quantity in headline(run):
            shown.setdefault(quantity.label, {})[name] = ends(run, quantity.key)
        for label, value in run.outcome.items():
            shown.setdefault(label, {})[name] = number(value, 3)
    for name, run in runs.items():
        state = "" if run.has_ended or not run.events else " (its end is not recorded)"
        shown.setdefault("steps", {})[name] = f"{run.last_step}{state}"
        shown.setdefault("alerts", {})[name] = str(len(_alarms(run)))
    return [[label, *(values.get(name, "–") for name in runs)] for label, values in shown.items()]


def _curves(runs: dict[str, Run], progress: dict[str, Callable], x: str) -> tuple[list[str], list[list[str]]]:
    """
    Draw the main quantities, and other keys that two or more runs logged, over each other.

    Returns:
        Two lists: the charts; and table rows (title, then a cell for each run) of keys beyond the main quantities
        that every run logged once at most, which is too little for a curve.
    """
    wanted: dict[str, dict[str, str]] = {}  # title → run → key
    for name, run in runs.items():
        for quantity in headline(run):
            wanted.setdefault(quantity.label, {})[name] = quantity.key
    shown = {key for keys in wanted.values() for key in keys.values()}
    logged = {name: {key for log in run.history for key in log} for name, run in runs.items()}
    for pattern in GROUPS.values():
        for key in sorted({key for keys in logged.values() for key in keys if pattern.fullmatch(key)} - shown):
            having = {name: key for name, keys in logged.items() if key in keys}
            if len(having) > 1:
                wanted[key] = having
    once = {name: logged_once(run) for name, run in runs.items()}
    points = {title: keys for title, keys in wanted.items() if all(key in once[name] for name, key in keys.items())}
    rows = [
        [title, *(number(once[name][keys[name]][1]) if name in keys else "–" for name in runs)]
        for title, keys in points.items()
        if not shown & {*keys.values()}
    ]

    def lines(axes, keys):
        for place, (name, run) in enumerate(runs.items()):
            points = _over(run, keys.get(name), progress[name])
            every = max(len(points) // 8, 1)
            draw_line(axes, points, "y", name, **line_style(place), markersize=4, markevery=every)
            for at in progress[name](_alarms(run)) if name in keys else []:
                foot = {"transform": axes.get_xaxis_transform(), "clip_on": False}
                axes.plot(at, 0.03, "^", color=line_style(place)["color"], **foot)

    unit = "optimizer step" if x == "step" else x
    several = [(title, keys) for title, keys in wanted.items() if title not in points]
    return [chart(title, partial(lines, keys=keys), xlabel=unit) for title, keys in several], rows


def _over(run: Run, key: str | None, progress: Callable) -> list[dict[str, Any]]:
    steps, values = curve(run.history, key)
    return [{"step": at, "y": value} for at, value in zip(progress(steps), values, strict=True)]


def _settings(runs: dict[str, Run]) -> tuple[list[list[str]] | None, list[list[str]]]:
    """
    Compare the settings of the runs.

    Returns:
        Two tables with a column for each run: the settings that differ (None if fewer than two runs recorded their
        settings); and the settings that only some of the trainers have.
    """
    recorded: dict[str, dict[str, Any]] = {}
    monitors: set[str] = set()
    for name, run in runs.items():
        if run.config:
            own = {known: of["args"] for known, of in run.registry.items() if isinstance(of, dict) and "args" in of}
            recorded[name] = {"trainer": run.trainer, **run.config, **own}
            monitors |= own.keys()
    if len(recorded) < 2:
        return None, []
    rows: list[list[str]] = []
    own_rows: list[list[str]] = []
    for key in ["trainer", *sorted(set().union(*recorded.values()) - {"trainer"} - FOLDERS)]:
        values = [_shown(recorded[name][key]) if key in recorded.get(name, {}) else "–" for name in runs]
        # A monitor that a run lacks is a difference between runs; a setting that a run's trainer lacks is not
        if len(set(values)) > 1:
            differs = key in monitors or len({*values} - {"–"}) > 1
            (rows if differs else own_rows).append([key, *values])
    return rows, own_rows


def _shown(value: Any) -> str:
    written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return written if len(written) <= 200 else f"{written[:200]}…"


def _samples(runs: dict[str, Run]) -> list[list[Any]]:
    """
    Return table rows for the latest prompts that all these runs answered, five at most.

    A row has the prompt, then each run's last answer to it.
    """
    last: dict[str, dict[str, dict[str, Any]]] = {}  # run → prompt → row, with the scores of all watches that wrote it
    for name, run in runs.items():
        answers = last.setdefault(name, {})
        for row in run.samples:
            prompt, before = str(row.get("prompt")), answers.get(str(row.get("prompt")))
            same = before and (before["step"], before.get("completion")) == (row["step"], row.get("completion"))
            answers[prompt] = {**row, "scores": {**before["scores"], **row["scores"]}} if same and before else row
    shared = set.intersection(*(set(answers) for answers in last.values()))
    latest = sorted(shared, key=lambda prompt: (-min(answers[prompt]["step"] for answers in last.values()), prompt))
    rows = []
    for prompt in latest[:PROMPTS]:
        cells: list[Any] = [prompt[:400]]
        for answers in last.values():
            row = answers[prompt]
            cells.append(shown_answer(row.get("completion"), f"step {row['step']}: {shown_scores(row['scores'])}"))
        rows.append(cells)
    return rows
