"""The page of one run: what it came to, its alerts, curves, samples and settings."""

import importlib.util
from datetime import UTC, datetime
from typing import Any

from ...runs import PRIVATE_FOLDER, is_notice
from .charts import COLOURS, chart, curves
from .headline import ends, headline
from .markup import code, document, none, number, section, table, text, tiles
from .recorded import Run, is_finite
from .runbook import link, what_to_do
from .verdict import not_passed, verdict, watchers

PHASES = ("first third", "second third", "last third")
SAMPLES = 5  # prompts a phase
LAST_GOOD = "last-good"  # where PPOTrainer leaves them
NO_CURVES = none("No curves: <code>pip install matplotlib</code>, which draws them.")


def page(run: Run) -> str:
    """The HTML."""
    generates = bool(run.samples) or "length" in run.metrics
    can_draw = importlib.util.find_spec("matplotlib") is not None
    drawn = f'<div class="charts">{"".join(curves(run))}</div>' if can_draw else NO_CURVES
    parts = [
        verdict(run),
        _heading(run),
        not_passed({"": run}),
        tiles(_ends(run)),
        _of_the_model(run),
        section("Alerts", alerts(run)),
        section("Curves", drawn),
        section("Scores by phase", _histograms(run)) if generates and can_draw else "",
        section("Samples over time", _samples(run), "own-page") if generates else "",
        section("Configuration", _config(run), "own-page"),
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
    return none(text(", ".join(filter(None, parts))))


def _of_the_model(run: Run) -> str:
    """Where the report on a reward model lies, seen from this page."""
    beside = any((run.folder / place / "reward_report.html").is_file() for place in ("", PRIVATE_FOLDER))
    return '<p><a href="reward_report.html">What the saved model is worth</a></p>' if beside else ""


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
        return none(f"{text(who[0].upper() + who[1:])}{' and found nothing' if run.monitors else ''}.")
    rows = []
    for alert in run.alerts:
        style = "warn" if alert.get("action") == "warn" else "act"
        action = "notice" if is_notice(alert) else alert.get("action")
        what, advice = (code(str(alert.get(name))[:800]) for name in ("what", "advice"))
        numbers = (number(alert.get(name)) for name in ("value", "bound"))
        shown = f'<span class="{style}">{text(action)}</span>'
        rows.append(
            [text(alert["step"]), shown, text(alert.get("monitor")), what, *numbers, f"{advice} {link(alert)}"]
        )
    columns = {"step": "number", "action": "short", "monitor": "short", "what": ""}
    return table({**columns, "value": "number", "bound": "number", "advice": ""}.items(), rows)


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
        return none("No single scores: <code>SamplesCallback</code> records some.")
    return f'<div class="charts">{"".join(charts)}</div>'


def shown_scores(scores: dict[str, Any]) -> str:
    shown = ", ".join(f"{name} {number(s)}" for name, s in scores.items() if isinstance(s, (int, float)))
    return text(shown[:400])


def _samples(run: Run) -> str:
    if not run.samples:
        return none("No completions: <code>SamplesCallback</code> records some.")
    rows = []
    for label, phase in zip(PHASES, _phases(run), strict=True):
        merged: dict[tuple, dict[str, Any]] = {}
        for row in phase:  # several watches write the same completion
            texts = str(row.get("prompt")), str(row.get("completion"))
            merged.setdefault((row["step"], *texts), {}).update(row["scores"])
        spread = sorted({round(i * (len(merged) - 1) / (SAMPLES - 1)) for i in range(SAMPLES)} if merged else ())
        for (step, prompt, completion), scores in (list(merged.items())[i] for i in spread):
            rows.append([label, text(step), text(prompt[:400]), text(completion[:800]), shown_scores(scores)])
    return table(
        {"phase": "short", "step": "number", "prompt": "text", "completion": "text", "scores": ""}.items(), rows
    )


def _config(run: Run) -> str:
    if not run.config:
        return none("Not recorded: <code>JSONLCallback</code> does.")
    rows = "".join(f'<tr><th scope="row">{text(k)}</th><td>{text(v)}</td></tr>' for k, v in sorted(run.config.items()))
    return (
        f"<details><summary>{len(run.config)} settings</summary>"
        f'<div class="settings"><table>{rows}</table></div></details>'
    )
