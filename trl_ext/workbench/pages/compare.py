"""Several runs on one page: their curves over each other, what they came to, and in what they differ."""

import importlib.util
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...callbacks import curve, draw_line
from ...runs import is_notice
from .charts import GROUPS, INK, chart, look
from .headline import ends, headline
from .markup import Markup, code, document, html, number
from .page import NO_CURVES, alerts, shown_scores
from .recorded import Run
from .runbook import what_to_do
from .verdict import not_passed, verdict_of_several

PROMPTS = 5  # that are shown with every run's answer
OF_THE_FOLDER = {"output_dir", "logging_dir"}  # settings that differ since the folders do


def named(folders: list[Path]) -> dict[str, Path]:
    """The folders by the shortest ends of their paths that tell them apart; raise if one is there twice."""
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


def comparison(runs: dict[str, Run], x: str = "step", title: str = "") -> str:
    """
    The HTML.

    Args:
        runs: by the names that they are shown with.
        x: what curves are drawn over: `step`, or a key that every run logs and that grows, as `episode`.
        title: of the page. The default is the names.
    """
    progress = {name: _progress(run, x) for name, run in runs.items()}
    drawn = NO_CURVES
    if importlib.util.find_spec("matplotlib") is not None:
        hint = (
            html.note("▲ at the foot of a chart is an alert of the run of that colour.")
            if any(map(_alarms, runs.values()))
            else ""
        )
        drawn = hint + html.charts(_curves(runs, progress, x))
    every = [alert for run in runs.values() for alert in run.alerts]
    sampled = sum(bool(run.samples) for run in runs.values())
    parts = [
        verdict_of_several(runs),
        not_passed(runs),
        _summary(runs),
        html.section("Curves", _other_axis(runs, x) + drawn),
        html.section("Settings that differ", _settings(runs)),
        html.section("Alerts", _alerts(runs)),
        html.section("The same prompts at the end", _samples(runs), "own-page") if sampled > 1 else "",
        what_to_do(every),
    ]
    return document(title or " · ".join(runs), parts)


def _alarms(run: Run) -> list[int]:
    """The steps of its alerts."""
    return [alert["step"] for alert in run.alerts if not is_notice(alert)]


def _progress(run: Run, x: str) -> Callable[[list[int]], list[float]]:
    """How far the run had come at an optimizer step, counted in `x`; between two logs it is taken as steady."""
    if x == "step":
        return lambda steps: list(map(float, steps))
    steps, values = curve(run.history, x)
    if not steps:
        raise ValueError(f"{run.folder} has no {x!r} in its logs; choose `--x step`, or a key that every run logs")
    return lambda asked: np.interp(asked, [0, *steps], [0.0, *values]).tolist()


def _other_axis(runs: dict[str, Run], x: str) -> str:
    """Say so where a step of one run is more than a step of another."""
    for key in ("episode", "num_tokens") if x == "step" else ():
        per_run = [curve(run.history, key) for run in runs.values()]
        if all(steps for steps, _ in per_run):
            ratios = [values[-1] / max(steps[-1], 1) for steps, values in per_run]
            if max(ratios) > 1.1 * min(ratios):
                return html.note(code(f"A step is not of one size in these runs: `--x {key}` draws them over that."))
    return ""


def _key(place: int) -> str:
    """A short piece of a run's line, for the table."""
    colour = look(place)["color"]
    return html.key("currentColor" if colour == INK else colour)


def _summary(runs: dict[str, Run]) -> str:
    """What each run came to, side by side: a column a run."""
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
    rows = [[label, *(of.get(name, "–") for name in runs)] for label, of in shown.items()]
    keys = {name: _key(place) for place, name in enumerate(runs)}
    return html.table([("first → last", ""), *((name, "number") for name in runs)], rows, keys)


def _alerts(runs: dict[str, Run]) -> str:
    return Markup().join(html.subsection(name, alerts(run)) for name, run in runs.items())


def _curves(runs: dict[str, Run], progress: dict[str, Callable], x: str) -> list[str]:
    """A chart of each quantity that a reader wants first, and of what else two runs or more have logged."""
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

    def lines(axes, keys):
        for place, (name, run) in enumerate(runs.items()):
            points = _over(run, keys.get(name), progress[name])
            every = max(len(points) // 8, 1)
            draw_line(axes, points, "y", name, **look(place), markersize=4, markevery=every)
            for at in progress[name](_alarms(run)) if name in keys else []:
                foot = {"transform": axes.get_xaxis_transform(), "clip_on": False}
                axes.plot(at, 0.03, "^", color=look(place)["color"], **foot)

    unit = "optimizer step" if x == "step" else x
    return [
        chart(title, partial(lines, keys=keys), xlabel=unit, is_legend_outside=True) for title, keys in wanted.items()
    ]


def _over(run: Run, key: str | None, progress: Callable) -> list[dict[str, Any]]:
    steps, values = curve(run.history, key)
    return [{"step": at, "y": value} for at, value in zip(progress(steps), values, strict=True)]


def _settings(runs: dict[str, Run]) -> str:
    recorded: dict[str, dict[str, Any]] = {}
    monitors: set[str] = set()
    for name, run in runs.items():
        if run.config:
            own = {known: of["args"] for known, of in run.registry.items() if isinstance(of, dict) and "args" in of}
            recorded[name] = {"trainer": run.trainer, **run.config, **own}
            monitors |= own.keys()
    if len(recorded) < 2:
        return html.note(code("Not recorded: `JSONLCallback` does."))
    # A setting that another trainer does not have is no difference; a monitor that another run does not have is one
    shared = set.intersection(*(set(settings) for settings in recorded.values())) - OF_THE_FOLDER
    rows = []
    for key in ["trainer", *sorted((shared | monitors) - {"trainer"})]:
        values = [_shown(recorded[name][key]) if key in recorded.get(name, {}) else "–" for name in runs]
        if len(set(values)) > 1:
            rows.append([key, *values])
    if not rows:
        return html.note("None.")
    return html.table([("setting", "short"), *((name, "") for name in runs)], rows)


def _shown(value: Any) -> str:
    written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return written if len(written) <= 200 else f"{written[:200]}…"


def _samples(runs: dict[str, Run]) -> str:
    """The last answer of each run to the prompts that all of them were asked, of those that keep samples."""
    last: dict[str, dict[str, dict[str, Any]]] = {}  # run → prompt → row, merged over the watches that wrote it
    for name, run in ((name, run) for name, run in runs.items() if run.samples):
        answers = last.setdefault(name, {})
        for row in run.samples:
            prompt, before = str(row.get("prompt")), answers.get(str(row.get("prompt")))
            same = before and (before["step"], before.get("completion")) == (row["step"], row.get("completion"))
            answers[prompt] = {**row, "scores": {**before["scores"], **row["scores"]}} if same and before else row
    shared = set.intersection(*(set(answers) for answers in last.values()))
    if not shared:
        return html.note("The runs' samples have no prompt in common.")
    latest = sorted(shared, key=lambda prompt: (-min(answers[prompt]["step"] for answers in last.values()), prompt))
    rows = []
    for prompt in latest[:PROMPTS]:
        cells = [prompt[:400]]
        for answers in last.values():
            row = answers[prompt]
            scores = f"step {row['step']}: {shown_scores(row['scores'])}"
            cells.append(html.below(str(row.get("completion"))[:800], scores))
        rows.append(cells)
    return html.table([("prompt", "text"), *((name, "text") for name in last)], rows)
