"""Write the page of one run: its verdict, results, alerts, curves, samples and settings."""

import math
import shlex
from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np

from ...callbacks import curve
from ...runs import RUNBOOK, root
from .charts import COLOURS, chart, curves, paid_curves
from .markup import number, render
from .recorded import Run, ends, headline, is_finite

PHASES = ("first third", "second third", "last third")
SAMPLES = 15  # answers on the page, spread over the run
# A monitor's action → what the verdict says that the monitor did; the most serious action first
DONE = {
    "stop": "stopped the run",
    "raise_kl": "raised the KL coefficient",
    "save": "saved a checkpoint",
    "warn": "warned",
}


def page(run: Run, evaluation: dict[str, Any] | None = None, evaluated: Iterable[list[str]] = ()) -> str:
    """
    Return the HTML page of one run.

    Args:
        run: the run.
        evaluation: content of the `evaluation.json` that `trl-ext evaluate` wrote for this run, if there is one.
        evaluated: the rows of figures that `evaluation_rows` made from it.
    """
    return render(
        "run.html.j2",
        title=run.folder.resolve().name,
        run=run,
        verdict=verdict(run),
        watched=sentence(watched(run)),
        heading=_heading(run),
        next_step=next_step(run),
        results=results(run),
        rise=ends(run, "attribution/rise")[-1:],
        evaluation=evaluation,
        evaluated=evaluated,
        paid_curves=paid_curves(run),
        curves=curves(run),
        histograms=_histograms(run),
        samples=_samples(run),
        runbook=runbook(run.alerts),
    )


def _heading(run: Run) -> str:
    begins = [event for event in run.events if event["type"] == "begin"]
    if not begins:
        return ""
    parts = [begins[-1].get("config_class"), f"run {begins[-1].get('run')}"]
    if begun := begins[0].get("timestamp"):
        parts.append(f"begun {datetime.fromtimestamp(begun, UTC):%Y-%m-%d %H:%M} UTC")
    parts += [f"resumed at step {begin['step']}" for begin in begins[1:]]
    return ", ".join(filter(None, parts))


def results(run: Run) -> dict[str, str]:
    """
    Return a run's results as texts by label: its main quantities (first → last value), its `outcome`, its last step
    and its number of alerts.
    """
    values = {label: ends(run, key) for label, key in headline(run).items()} | run.outcome
    shown = {label: " → ".join(number(value, 3) for value in of) for label, of in values.items()}
    steps = f"{run.last_step}{'' if run.has_ended else ', not ended'}"
    shown |= {"steps": steps, "alerts": str(len(alarms(run)))}
    return shown


def _histograms(run: Run) -> list[str]:
    charts = []
    for name in sorted({name for row in run.samples for name in row["scores"]}):
        scores = [row["scores"].get(name) for row in run.samples]
        scores = [score for score in scores if is_finite(score) and abs(score) < 1e100]  # so that bounds are finite

        def draw(axes, scores=scores):
            # Reversed, since the legend lists them in reverse
            style = {"histtype": "step", "density": True, "linewidth": 1.6, "linestyle": ["-", "--", ":"]}
            phases = np.array_split(scores, 3)[::-1]
            axes.hist(phases, 24, label=PHASES[::-1], color=COLOURS[2::-1], **style)

        if scores:
            charts.append(chart(f"{name}: density of single scores", draw, xlabel="score"))
    return charts


def _samples(run: Run) -> list[dict[str, Any]]:
    places = np.linspace(0, max(len(run.samples) - 1, 0), SAMPLES).astype(int)
    return [run.samples[place] for place in sorted(set(places))] if run.samples else []


def next_step(run: Run) -> str:
    """Return advice on what to do after a run, which depends on how it ended, its alerts and what it trained."""
    folder = shlex.quote(str(run.folder))
    if not run.has_ended:
        return "the same command resumes the run."
    if any(alert["action"] == "stop" for alert in alarms(run)):
        return "read the alerts and the samples, and fix the cause. To continue, see `docs/runbook.md#after-a-stop`."
    if run.passed is False:
        return "read the report of the saved reward model before you train on it."
    made = {"RewardConfig": "--reward_model_name_or_path", "CriticConfig": "--value_model_name_or_path"}
    if flag := made.get(run.trainer):
        return f"PPO with it: `trl-ext ppo --model_name_or_path POLICY --dataset_name PROMPTS {flag} {folder}`."
    first = "read the alerts and the samples; then " if alarms(run) else ""
    return f"{first}compare it with its start: `trl-ext evaluate START {folder} --prompts HELD_OUT_PROMPTS`."


# ---- The verdict ----


def verdict(run: Run) -> str:
    """Summarise a run in one sentence: how its main quantities changed, and what its report and its monitors found."""
    parts = [listed([_change(run, label, key) for label, key in wanted(run).items()])]
    if run.passed is not None:
        parts.append(f"the saved model {'passed' if run.passed else 'did not pass'} its report")
    said = "; ".join(filter(None, [*parts, watched(run)]))
    return sentence(said if run.has_ended or not said else f"so far {said}")


def wanted(run: Run) -> dict[str, str]:
    """
    Map the label of each metric that the verdict names to its key in the log.

    If the run logs a reward, the verdict names score, held-out gold and KL. For another run it names the first metric
    of the [`headline`], and the losses; metrics on training data are named only if none is on held-out data.
    """
    shown = headline(run)
    if "reward" in run.metrics:
        return {
            label: key for label, key in shown.items() if label.partition(",")[0] in ("score", "held-out gold", "KL")
        }
    shown = {label: key for label, key in shown.items() if label.startswith("held-out")} or shown
    first = next(iter(shown), "")
    return {label: key for label, key in shown.items() if label == first or label.partition(",")[0].endswith("loss")}


def _change(run: Run, label: str, key: str) -> str:
    name, _, unit = label.partition(", ")
    first, *rest = ends(run, key)
    what = f"the {name}"
    shown = [number(value, 3) + f" {unit}".rstrip() for value in (first, *rest)]
    if not rest:
        return f"{what} was {shown[0]}"
    if not is_finite(rest[0]):
        return f"{what} ended as {rest[0]}"
    if shown[0] == shown[1] or _is_noise(curve(run.history, key)[1]):
        return f"{what} hardly changed ({number(first, 3)} to {shown[1]})"
    return f"{what} {'rose' if rest[0] > first else 'fell'} from {number(first, 3)} to {shown[1]}"


def _is_noise(values: list[float]) -> bool:
    """
    Return whether the last value differs from the first by less than 2 σ; False for fewer than four values.

    σ is the root mean square of the differences between neighbouring values, to which a slow trend hardly adds.
    """
    steps = [b - a for a, b in pairwise(values)]
    if len(steps) < 3:
        return False
    sigma = math.sqrt(fmean(step**2 for step in steps))
    return abs(values[-1] - values[0]) < 2 * sigma


def alarms(run: Run) -> list[dict[str, Any]]:
    """Return a run's alerts without its notices, which are about a problem of the monitor and not of the run."""
    return [alert for alert in run.alerts if alert.get("level") != "notice"]


def by_monitors(run: Run) -> str:
    """Describe each monitor's most serious action and the step when it first took this action; "" if none acted."""
    said: dict[str, str] = {}
    actions = [*DONE]
    for alert in sorted(alarms(run), key=lambda alert: actions.index(alert["action"])):
        said.setdefault(alert["monitor"], f"{alert['monitor']} {DONE[alert['action']]} at step {alert['step']}")
    return listed([*said.values()])


def watched(run: Run) -> str:
    """Describe what the monitors found, or which monitors found nothing; "" if the run's monitors are not recorded."""
    if run.monitors and not alarms(run):
        return f"{listed(sorted(run.monitors))} watched and found nothing"
    return by_monitors(run) or ("no monitors were set" if run.monitors == {} else "")


def listed(parts: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def sentence(said: str) -> str:
    return f"{said[0].upper()}{said[1:]}." if said else ""


def runbook(alerts: Iterable[dict[str, Any]]) -> dict[str, list[list[str]]]:
    """
    Return the table of each section of the runbook that alerts link to, by its name: a list of rows of Markdown cells.

    The page contains these sections, so an alert's link works wherever the page is copied.
    """
    wanted = {alert["runbook"].partition("#")[2] for alert in alerts}
    tables = {}
    for part in (root() / RUNBOOK).read_text(encoding="utf-8").split("\n## ")[1:]:
        name, *lines = part.splitlines()
        rows = [line.strip(" |").split(" | ") for line in lines if line.startswith("|") and not line.startswith("|--")]
        if name.strip() in wanted and rows:
            tables[name.strip()] = rows
    return tables
