"""The page of one run: what it came to, its alerts, curves, samples and settings."""

import importlib.util
from datetime import UTC, datetime
from typing import Any

from ...runs import PRIVATE_FOLDER, is_notice
from .charts import COLOURS, chart, curves
from .headline import ends, headline
from .markup import Markup, code, document, html, number
from .recorded import Run, is_finite
from .runbook import link, what_to_do
from .verdict import not_passed, verdict, watchers

PHASES = ("first third", "second third", "last third")
SAMPLES = 5  # prompts a phase
LAST_GOOD = "last-good"  # where PPOTrainer leaves them
NO_CURVES = html.note(code("No curves: `pip install matplotlib`, which draws them."))


def page(run: Run) -> str:
    """The HTML."""
    generates = bool(run.samples) or "length" in run.metrics
    can_draw = importlib.util.find_spec("matplotlib") is not None
    drawn = html.charts(curves(run)) if can_draw else NO_CURVES
    parts = [
        verdict(run),
        _heading(run),
        not_passed({"": run}),
        html.tiles(_ends(run)),
        _of_the_model(run),
        html.section("Alerts", alerts(run)),
        html.section("Curves", drawn),
        html.section("Scores by phase", _histograms(run)) if generates and can_draw else "",
        html.section("Samples over time", _samples(run), "own-page") if generates else "",
        html.section("Configuration", _config(run), "own-page"),
        what_to_do(run.alerts),
    ]
    return document(run.folder.resolve().name, parts)


def _heading(run: Run) -> str:
    begins = [event for event in run.events if event.get("type") == "begin"]
    if not begins:
        return ""
    parts = [str(begins[-1].get("config_class", "")), f"run {begins[-1].get('run', 'without an id')}"]
    if is_finite(begins[0].get("timestamp")):
        parts.append(f"begun {datetime.fromtimestamp(begins[0]['timestamp'], UTC):%Y-%m-%d %H:%M} UTC")
    parts += [f"resumed at step {begin['step']}" for begin in begins[1:]]
    if not run.has_ended:
        parts.append("its end is not recorded: it runs, was killed, or stopped with an error")
        if (run.folder / LAST_GOOD).is_dir():
            parts.append(f"the weights before a gradient that was not finite are in {LAST_GOOD}")
    return html.note(", ".join(filter(None, parts)))


def _of_the_model(run: Run) -> str:
    """Where the report on a reward model lies, seen from this page."""
    beside = any((run.folder / place / "reward_report.html").is_file() for place in ("", PRIVATE_FOLDER))
    return html.paragraph(html.link("reward_report.html", "What the saved model is worth")) if beside else ""


def _ends(run: Run) -> dict[str, str]:
    notices = sum(map(is_notice, run.alerts))
    shown = {quantity.label: ends(run, quantity.key) for quantity in headline(run)}
    shown |= {label: number(value, 3) for label, value in run.outcome.items()}
    shown |= {"steps": str(run.last_step), "alerts": str(len(run.alerts) - notices)}
    return shown | ({"notices of monitors": str(notices)} if notices else {})


def alerts(run: Run) -> str:
    """The alerts of a run, each with a link to what to do."""
    if not run.alerts:
        who = watchers(run) or "none; which monitors were set is not recorded"
        return html.note(f"{who[0].upper() + who[1:]}{' and found nothing' if run.monitors else ''}.")
    rows = []
    for alert in run.alerts:
        style = "warn" if alert.get("action") == "warn" else "act"
        action = "notice" if is_notice(alert) else alert.get("action")
        what, advice = (code(str(alert.get(name))[:800]) for name in ("what", "advice"))
        numbers = (number(alert.get(name)) for name in ("value", "bound"))
        shown = html.marked(action, style)
        rows.append(
            [alert["step"], shown, alert.get("monitor"), what, *numbers, Markup(" ").join([advice, link(alert)])]
        )
    columns = {"step": "number", "action": "short", "monitor": "short", "what": ""}
    return html.table([*columns.items(), ("value", "number"), ("bound", "number"), ("advice", "")], rows)


def _phases(run: Run) -> list[list[dict[str, Any]]]:
    third = max(run.last_step, 1) / 3
    return [[row for row in run.samples if min(int(row["step"] / third), 2) == phase] for phase in range(3)]


def _is_score(score: Any) -> bool:
    return isinstance(score, (int, float)) and abs(score) < 1e100  # what a histogram can have as a bound; no NaN


def _histograms(run: Run) -> str:
    phases = _phases(run)
    names = sorted({n for row in run.samples for n, s in row["scores"].items() if _is_score(s)})
    charts = []
    for name in names:
        parts = [[float(row["scores"][name]) for row in rows if _is_score(row["scores"].get(name))] for rows in phases]
        low, high = min(map(min, filter(None, parts))), max(map(max, filter(None, parts)))

        def draw(axes, parts=parts, low=low, high=high):
            for values, label, colour, style in zip(parts, PHASES, COLOURS, (":", "--", "-"), strict=False):
                if values:
                    edges = (low, high if high > low else low + 1)
                    shape = {"density": True, "histtype": "step", "linewidth": 1.6, "linestyle": style}
                    axes.hist(values, 24, range=edges, label=label, color=colour, **shape)

        charts.append(chart(f"{name}: density of single scores", draw, xlabel="score"))
    if not charts:
        return html.note(code("No single scores: `SamplesCallback` records some."))
    return html.charts(charts)


def shown_scores(scores: dict[str, Any]) -> str:
    shown = ", ".join(f"{name} {number(s)}" for name, s in scores.items() if isinstance(s, (int, float)))
    return shown[:400]


def _samples(run: Run) -> str:
    if not run.samples:
        return html.note(code("No completions: `SamplesCallback` records some."))
    rows = []
    for label, phase in zip(PHASES, _phases(run), strict=True):
        merged: dict[tuple, dict[str, Any]] = {}
        for row in phase:  # several watches write the same completion
            texts = str(row.get("prompt")), str(row.get("completion"))
            merged.setdefault((row["step"], *texts), {}).update(row["scores"])
        spread = sorted({round(i * (len(merged) - 1) / (SAMPLES - 1)) for i in range(SAMPLES)} if merged else ())
        for (step, prompt, completion), scores in (list(merged.items())[i] for i in spread):
            rows.append([label, step, prompt[:400], completion[:800], shown_scores(scores)])
    return html.table(
        [("phase", "short"), ("step", "number"), ("prompt", "text"), ("completion", "text"), ("scores", "")], rows
    )


def _config(run: Run) -> str:
    if not run.config:
        return html.note(code("Not recorded: `JSONLCallback` does."))
    return html.settings(f"{len(run.config)} settings", sorted(run.config.items()))
