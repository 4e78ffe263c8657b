"""Read the files that the last run in a folder wrote: curves, alerts, samples and settings."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...callbacks import METRICS, Metric
from ...runs import PRIVATE_FOLDER, REGISTRY, read_jsonl, redacted
from ...runs import is_finite_number as is_finite

# Trainer's configuration → a key that only this trainer logs; most keys are logged by several trainers
_SIGNATURES = {"DPOConfig": "rewards/margins", "RewardConfig": "margin", "SFTConfig": "mean_token_accuracy"}


@dataclass
class Run:
    """Hold what a run recorded in its folder."""

    folder: Path
    history: list[dict[str, Any]]
    alerts: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    registry: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)  # lines that JSONLCallback wrote
    outcome: dict[str, float] = field(default_factory=dict)  # measured after training, as in a round of online DPO
    monitors: dict[str, Any] | None = None  # name → arguments; None if monitors were not recorded
    objections: list[str] = field(default_factory=list)  # in the reports on its reward models when it began
    report: dict[str, Any] = field(default_factory=dict)  # verdict of the report on the reward model that it saved

    @property
    def trainer(self) -> str:
        """Return the name of the run's configuration class, as recorded, or else guessed from the logged keys."""
        for event in reversed(self.events):
            if event.get("config_class") in METRICS:
                return event["config_class"]
        keys = {key for log in self.history for key in log}
        if signed := next((trainer for trainer, key in _SIGNATURES.items() if key in keys), None):
            return signed
        return max(METRICS, key=lambda trainer: len({metric.key for metric in METRICS[trainer].values()} & keys))

    @property
    def metrics(self) -> dict[str, Metric]:
        """Return the metrics that the run's trainer logs, by name."""
        return METRICS[self.trainer]

    @property
    def has_ended(self) -> bool:
        """Return whether an end of training is recorded after the last time that the run began or was resumed."""
        kinds = [event.get("type") for event in self.events]
        since = max((place for place, kind in enumerate(kinds) if kind == "begin"), default=0)
        return "end" in kinds[since:]

    @property
    def last_step(self) -> int:
        return int(max((row["step"] for row in (*self.history, *self.samples)), default=0))


def read_run(folder: Path) -> Run:
    """
    Return what the last run in an output directory recorded.

    Raises:
        ValueError: the directory holds no run, or a run that has logged nothing.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give the output directory of a run")
    private = folder / PRIVATE_FOLDER  # where a run that is pushed to the hub records
    source = private if private.is_dir() else folder
    lines = source / "metrics.rank0.jsonl"
    events = [event for event in read_jsonl(lines) if is_finite(event.get("step"))] if lines.is_file() else []
    begins = _begins(events)
    events = _of_this_run(events, begins)
    since = begins[0]["timestamp"] if begins and is_finite(begins[0].get("timestamp")) else 0
    found = [path for place in ("", "checkpoint-*/") for path in folder.glob(f"{place}trainer_state.json")]
    states = sorted((path for path in found if _time(path) >= since), key=_time, reverse=True)
    state = next(filter(None, map(read_object, states)), {})  # a run may have been killed while it wrote the newest
    registry = (state.get("stateful_callbacks") or {}).get(REGISTRY, {})
    run = Run(folder, state.get("log_history", []), alerts=registry.get("alerts", []), registry=registry)
    if state:  # monitors that were set are in each checkpoint
        run.monitors = {name: of["args"] for name, of in registry.items() if isinstance(of, dict) and "args" in of}
    if events:
        run.events = events
        run.history = [{**event["logs"], "step": event["step"]} for event in events if "logs" in event]
        run.monitors = next((event["monitors"] for event in reversed(events) if "monitors" in event), run.monitors)
        run.registry = {**{name: {"args": args} for name, args in (run.monitors or {}).items()}, **run.registry}
        run.objections = list(map(str, (begins[-1].get("objections") if begins else None) or []))
        run.config = redacted(next((e["config"] for e in reversed(events) if "config" in e), {}))
    run.registry = redacted(run.registry)  # the page shows the monitors' arguments
    if (folder / "alerts.jsonl").is_file():
        run.alerts = list(read_jsonl(folder / "alerts.jsonl"))
    run.alerts = redacted([alert for alert in _of_this_run(run.alerts, begins) if is_finite(alert.get("step"))])
    file = folder / "reward_report.json"  # an older one is about another run's model
    report = read_object(file) if file.is_file() and _time(file) >= since else {}
    run.report = report["verdict"] if isinstance(report.get("verdict"), dict) else {}
    measured = read_object(folder / "round.json")  # of online DPO; {} for a round that is not complete
    run.outcome = _outcome(measured)
    if isinstance(alert := measured.get("alert"), dict):  # which the watch over rounds gave after this round
        run.alerts.append(redacted({**alert, "step": run.last_step}))
    if is_finite(report.get("accuracy")):
        trained_on = report.get("trained_on")  # if that is not known, the report's pairs may have been trained on
        is_held_out = isinstance(trained_on, dict) and trained_on.get("is_known") is True
        run.outcome[f"{'held-out ' if is_held_out else ''}accuracy, as saved"] = report["accuracy"]
    rows = [row for path in sorted(source.glob("completions.rank*.jsonl")) for row in read_jsonl(path)]
    rows = [row for row in rows if is_finite(row.get("step")) and isinstance(row.get("scores"), dict)]
    run.samples = sorted(_of_this_run(rows, begins), key=lambda row: row["step"])
    if events and not (run.history or run.samples):
        raise ValueError(
            f"{folder} is a run that has logged nothing: it ended before its first log, or has not reached it yet"
        )
    if not (run.history or run.samples):
        within = sorted({str(path.parent) for path in folder.glob("**/metrics.rank0.jsonl")})
        if within:
            raise ValueError(f"{folder} is not a run, but contains some: give one or several of {', '.join(within)}")
        raise ValueError(
            f"{folder} has neither metrics.rank0.jsonl nor a trainer_state.json nor completions.rank*.jsonl; add "
            "JSONLCallback to the script, or give the folder that contains a checkpoint"
        )
    return run


def rounds_of(folder: Path) -> list[Path]:
    """Return the folders of an online DPO run's rounds, in order: each is a run. Return [] if there are no rounds."""
    if (folder / "metrics.rank0.jsonl").is_file() or (folder / PRIVATE_FOLDER).is_dir():
        return []
    rounds = [path.parent for path in folder.glob("round-*/metrics.rank0.jsonl")]
    return sorted(rounds, key=lambda path: (len(path.name), path.name))


def _time(path: Path) -> float:
    return path.stat().st_mtime


def _outcome(measured: dict[str, Any]) -> dict[str, float]:
    """Return label → value for a round's held-out scores, the length of its answers, and the risk of a hack."""
    outcome = {f"held-out {name}": score for name, score in measured.get("held_out", {}).items()}
    shown = {"held-out length, tokens": measured.get("length"), "risk of a hack": measured.get("risk")}
    return outcome | {label: value for label, value in shown.items() if value is not None}


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if the file holds none, is not complete or cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _begins(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the `begin` events of the last run: one for its start, and one for each time that it was resumed."""
    begins = [event for event in events if event.get("type") == "begin"]
    starts = [i for i, begin in enumerate(begins) if begin["step"] == 0]  # for older files, whose events have no id
    run = begins[-1].get("run") if begins else None
    return [begin for begin in begins if begin.get("run") == run] if run else begins[starts[-1] if starts else 0 :]


def _of_this_run(rows: list[dict[str, Any]], begins: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    Return the rows of the run with these `begin` events; without any events return all rows.

    Where the run was resumed and repeated steps, only the newer rows of these steps are kept.
    """
    times = [(b["timestamp"] if is_finite(b.get("timestamp")) else -math.inf, b["step"]) for b in begins]

    def is_kept(row: dict[str, Any]) -> bool:
        at = row["timestamp"] if is_finite(row.get("timestamp")) else math.inf
        return at >= times[0][0] and not any(at < resumed and row["step"] > step for resumed, step in times)

    return [row for row in rows if is_kept(row)] if times else rows
