"""Write the page of one run: its results, alerts, curves, samples and settings."""

from datetime import UTC, datetime
from typing import Any

from ...callbacks import curve
from ...runs import PRIVATE_FOLDER, is_notice
from .charts import COLOURS, can_draw, chart, curves
from .conversation import shown_answer
from .headline import ends, headline
from .markup import TEMPLATES, number, render
from .recorded import Run, is_finite
from .runbook import section_of, sections, what_to_do
from .verdict import not_passed, verdict, watchers

PHASES = ("first third", "second third", "last third")
SAMPLES = 5  # answers that are shown of each phase
LAST_GOOD = "last-good"  # folder in which PPO saves the weights that it had before a gradient was not finite


def page(run: Run) -> str:
    """Return the HTML page of one run."""
    drawn, points = curves(run) if can_draw() else (None, [])
    return render(
        TEMPLATES / "run.html.j2",
        title=run.folder.resolve().name,
        verdict=verdict(run),
        heading=_heading(run),
        not_passed=not_passed({"": run}),
        tiles=_tiles(run),
        # The page links to it by a relative path, which works within the run's folder
        has_reward_report=any((run.folder / each / "reward_report.html").is_file() for each in ("", PRIVATE_FOLDER)),
        alerts=alerts(run),
        curves=drawn,
        points=[[key, str(step), number(value)] for key, step, value in points],
        generates=bool(run.samples) or "length" in run.metrics,
        can_answer="record_answers" in run.config,
        scores_answers=any(row["scores"] for row in run.samples) or "length" in run.metrics,
        histograms=_histograms(run) if can_draw() else [],
        samples=_samples(run),
        config=run.config,
        what_to_do=what_to_do(run.alerts),
    )


def _heading(run: Run) -> str:
    begins = [event for event in run.events if event.get("type") == "begin"]
    if not begins:
        return ""
    parts = [str(begins[-1].get("config_class", "")), f"run {begins[-1].get('run', 'without an id')}"]
    if is_finite(begins[0].get("timestamp")):
        parts.append(f"begun {datetime.fromtimestamp(begins[0]['timestamp'], UTC):%Y-%m-%d %H:%M} UTC")
    parts += [f"resumed at step {begin['step']}" for begin in begins[1:]]
    if not run.has_ended:
        parts.append("its end is not recorded: it is still running, was killed, or stopped with an error")
        if (run.folder / LAST_GOOD).is_dir():
            parts.append(f"{LAST_GOOD} has the weights from before a gradient that was not finite")
    return ", ".join(filter(None, parts))


def _tiles(run: Run) -> dict[str, str]:
    notices = sum(map(is_notice, run.alerts))
    shown = {"watch for a hack": _watch(run)} if "reward" in run.metrics and run.monitors is not None else {}
    shown |= {quantity.label: ends(run, quantity.key) for quantity in headline(run)}
    shown |= {label: number(value, 3) for label, value in run.outcome.items()}
    shown |= {"steps": str(run.last_step), "alerts": str(len(run.alerts) - notices)}
    return shown | ({"notices of monitors": str(notices)} if notices else {})


def _watch(run: Run) -> str:
    """Return the text of HackWatch's tile: "not watched", its first alarm, or the highest risk without an alarm."""
    if "HackWatch" not in (run.monitors or {}):
        return "not watched"
    alarms = [alert for alert in run.alerts if alert.get("monitor") == "HackWatch" and not is_notice(alert)]
    if alarms:
        return f"alarm at step {alarms[0]['step']}, risk {number(alarms[0].get('value'), 2)}"
    highest = max(curve(run.history, "watch/risk")[1], default=0.0)
    return f"no alarm, highest risk {number(highest, 2)}"


def alerts(run: Run) -> dict[str, Any]:
    """
    Return a run's alerts for the templates.

    Returns:
        `rows`: one for each alert, with the section of the runbook that it links to; and `otherwise`: a sentence on
        the run's monitors, to show if there are no rows.
    """
    who = watchers(run) or "no alert is recorded, nor which monitors were set"
    known, rows = sections(), []
    for alert in run.alerts:
        action = {"level": alert.get("action"), "word": "notice" if is_notice(alert) else alert.get("action")}
        what, sentence = (str(alert.get(name))[:800] for name in ("what", "advice"))
        advice = {"sentence": sentence, "section": "", "runbook": str(alert.get("runbook"))[:200]}
        if (section := section_of(alert)) in known:
            advice["section"] = section
        numbers = (number(alert.get(name)) for name in ("value", "bound"))
        rows.append([alert["step"], action, alert.get("monitor"), what, *numbers, advice])
    return {"rows": rows, "otherwise": f"{who[0].upper()}{who[1:]}{' and found nothing' if run.monitors else ''}."}


def _phases(run: Run) -> list[list[dict[str, Any]]]:
    third = max(run.last_step, 1) / 3
    return [[row for row in run.samples if min(int(row["step"] / third), 2) == phase] for phase in range(3)]


def _is_score(score: Any) -> bool:
    return isinstance(score, (int, float)) and abs(score) < 1e100  # a histogram's bounds must be finite


def _histograms(run: Run) -> list[str]:
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
    return charts


def shown_scores(scores: dict[str, Any]) -> str:
    """Return the scores of one answer as one line of names and numbers."""
    shown = ", ".join(f"{name} {number(s)}" for name, s in scores.items() if isinstance(s, (int, float)))
    return shown[:400]


def _samples(run: Run) -> list[list[Any]]:
    rows = []
    for label, phase in zip(PHASES, _phases(run), strict=True):
        merged: dict[tuple, dict[str, Any]] = {}
        for row in phase:  # several watches write the same completion
            texts = str(row.get("prompt")), str(row.get("completion"))
            first = merged.setdefault((row["step"], *texts), {**row, "scores": {}})
            first["scores"] |= row["scores"]
        spread = sorted({round(i * (len(merged) - 1) / (SAMPLES - 1)) for i in range(SAMPLES)} if merged else ())
        for row in (list(merged.values())[i] for i in spread):
            answer = shown_answer(row.get("completion"))
            rows.append([label, row["step"], str(row.get("prompt"))[:400], answer, shown_scores(row["scores"])])
    return rows
