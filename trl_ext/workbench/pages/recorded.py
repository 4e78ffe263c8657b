"""Read the files that the last run in a folder wrote, and choose the main quantities among its metrics."""

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...callbacks import METRICS, Metric
from ...runs import PRIVATE_FOLDER, REGISTRY, is_finite_number as is_finite, read_jsonl, redacted

# Name and unit → key of the main quantities of trainers that do not sample answers, the most important first
HEADLINES = {
    "SFTConfig": {
        "loss, nats per token": "loss",
        "token accuracy": "mean_token_accuracy",
        "entropy, nats per token": "entropy",
    },
    "RewardConfig": {
        "pair accuracy": "accuracy",
        "margin, score": "margin",
        "loss": "loss",
        "mean score": "mean_reward",
    },
    "CriticConfig": {"explained variance": "val/explained_variance", "root mean square error, score": "val/rmse"},
    "DPOConfig": {
        "pair accuracy": "rewards/accuracies",
        "margin, nats · β": "rewards/margins",
        "loss": "loss",
        "β": "beta",
        "chosen answers' log-prob change, nats": "logps/chosen_delta",
        "drift, nats": "logps/drift",
    },
    "KTOConfig": {"margin": "rewards/margins", "loss": "loss"},
}
# Those of trainers that do, by their names in `METRICS`
SAMPLED = {
    "reward": "score",
    "kl": "KL, {unit}",
    "entropy": "entropy, {unit}",
    "length": "length, {unit}",
    "length_clipped": "cut off, {unit}",
}
GOLD = re.compile(r"eval_gold/mean|eval_rewards/[^/]*gold[^/]*/mean")


@dataclass
class Run:
    """
    Hold what a run recorded in its folder.

    Args:
        folder: the run's output directory.
        history: what the trainer logged, a dictionary with `step` for each log.
        alerts: a dict for each alert, with `monitor`, `action`, `step`, `runbook` and others.
        samples: a dict for each of some answers, with `prompt`, `completion`, `scores` (by name), `step` and others.
        config: its training arguments.
        registry: the monitors' states by name, as in `trainer_state.json`.
        events: a dict for each line that JSONLCallback wrote.
        outcome: by label, a list with a figure measured after training; for a round of online DPO, with the figure
            before the round and the one after it.
        monitors: maps each monitor's name to its arguments; None if monitors were not recorded.
        paid: a dict for each feature of answers that the reward paid for, as HackWatch or a round of online DPO wrote
            it, with `what`, the feature in words, `curve`, a list of [step, value], and others.
        objections: a text on why a report says not to trust the reward model that the run saved, if it says so.
        passed: whether the reward model that the run saved passed its report; None without a report.
    """

    folder: Path
    history: list[dict[str, Any]]
    alerts: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    registry: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    outcome: dict[str, list[float]] = field(default_factory=dict)
    monitors: dict[str, Any] | None = None
    paid: list[dict[str, Any]] = field(default_factory=list)
    objections: list[str] = field(default_factory=list)
    passed: bool | None = None

    @property
    def keys(self) -> set[str]:
        """Return the keys that the run has logged."""
        return {key for log in self.history for key in log} - {"step"}

    @property
    def trainer(self) -> str:
        """Return the name of the run's configuration class, as recorded, or else guessed from the logged keys."""
        recorded = [event["config_class"] for event in self.events if event.get("config_class") in METRICS]
        if recorded:
            return recorded[-1]
        return max(METRICS, key=lambda name: len({*main_keys(name).values()} & self.keys))

    @property
    def metrics(self) -> dict[str, Metric]:
        """Return the metrics that the run's trainer logs, by name."""
        return METRICS[self.trainer]

    @property
    def has_ended(self) -> bool:
        """Return whether the run ended after it last began or was resumed; True if its records do not say."""
        kinds = [event["type"] for event in self.events if event["type"] in ("begin", "end")]
        return kinds[-1:] != ["begin"]

    @property
    def last_step(self) -> int:
        return int(max((row["step"] for row in (*self.history, *self.samples)), default=0))


def main_keys(trainer: str) -> dict[str, str]:
    """
    Map the name (with unit) of each main quantity that a trainer logs to its key in the log.

    `trainer` is the name of the trainer's configuration class, such as `PPOConfig`.
    """
    metrics = METRICS[trainer]
    sampled = {
        label.format(unit=metrics[name].unit): metrics[name].key for name, label in SAMPLED.items() if name in metrics
    }
    return HEADLINES.get(trainer, sampled)


def headline(run: Run) -> dict[str, str]:
    """
    Map the name (with unit) of each main quantity that a run has logged to its key in the log.

    A quantity that is also logged on held-out data has a further entry, `held-out NAME`, with the key `eval_KEY`; the
    score by a gold reward is `held-out gold`.
    """
    keys = sorted(run.keys)
    found: dict[str, str] = {}
    for label, key in main_keys(run.trainer).items():
        found |= {label: key, f"held-out {label}": f"eval_{key}"}
        if label == "score" and (gold := [*filter(GOLD.fullmatch, keys)]):
            found["held-out gold"] = gold[0]
    return {label: key for label, key in found.items() if key in keys}


def ends(run: Run, key: str) -> list[Any]:
    """
    Return the first and the last logged value of a key, rounded to 6 decimals; one value if it was logged at one step,
    [] if never.
    """
    values = [*{log["step"]: log[key] for log in run.history if key in log}.values()]  # the end is evaluated twice
    values = [round(value, 6) if is_finite(value) else value for value in values]  # a KL of 0 has rounding errors
    return values[:1] + values[1:][-1:]


def read_run(folder: Path) -> Run:
    """
    Read the records of the last run in an output directory.

    Raises:
        ValueError: the directory holds no run that has logged anything.
    """
    private = folder / PRIVATE_FOLDER  # where a run that is pushed to the hub records
    source = private if private.is_dir() else folder
    events = _rows(source / "metrics.rank0.jsonl")
    begins = [event for event in events if event["type"] == "begin"]
    begins = [begin for begin in begins if begin.get("run") == begins[-1].get("run")]
    since = begins[0].get("timestamp", 0) if begins else 0
    found = [path for place in ("", "checkpoint-*/") for path in folder.glob(f"{place}trainer_state.json")]
    states = sorted((path for path in found if _time(path) >= since), key=_time, reverse=True)
    state = next(filter(None, map(read_object, states)), {})  # a run may have been killed while it wrote the newest
    registry = (state.get("stateful_callbacks") or {}).get(REGISTRY, {})
    run = Run(folder, state.get("log_history", []), alerts=registry.get("alerts", []), registry=registry)
    if state:  # monitors that were set are in each checkpoint
        run.monitors = {name: of["args"] for name, of in registry.items() if isinstance(of, dict) and "args" in of}
    if events:
        run.events = _of_this_run(events, begins)
        run.history = [{**event["logs"], "step": event["step"]} for event in run.events if "logs" in event]
        run.monitors = next((event["monitors"] for event in reversed(run.events) if "monitors" in event), run.monitors)
        given = {name: {"args": args} for name, args in (run.monitors or {}).items()}
        registry = {**given, **registry}
        run.config = redacted(next((event["config"] for event in reversed(run.events) if "config" in event), {}))
    run.monitors, run.registry = redacted(run.monitors), redacted(registry)  # the page shows the monitors' arguments
    run.alerts = redacted(_of_this_run(_rows(folder / "alerts.jsonl") or run.alerts, begins))
    rows = [row for path in sorted(source.glob("completions.rank*.jsonl")) for row in _rows(path)]
    run.samples = sorted(_of_this_run(rows, begins), key=lambda row: row["step"])
    if not (run.history or run.samples):
        within = [str(path.parent) for path in sorted(folder.glob("**/metrics.rank0.jsonl"))]
        raise ValueError(
            f"{folder} has no logs of a run: give the folder of a run; runs within it: {', '.join(within) or 'none'}"
        )
    paid = source / "attribution.json"
    if paid.is_file() and _time(paid) >= since:
        run.paid = read_object(paid).get("paid", [])
    _read_results(run, since)
    return run


def _read_results(run: Run, since: float) -> None:
    """Add to `run` what was measured after it: in a round of online DPO, or by a reward report newer than `since`."""
    measured = read_object(run.folder / "round.json")  # {} for a round that is not complete
    before = read_object(run.folder / f"../round-{measured.get('round', 0) - 1}/round.json")
    for each in (before, measured):
        shown = {f"held-out {name}": score for name, score in each.get("held_out", {}).items()}
        shown |= {"held-out length, tokens": each.get("length"), "risk of a hack": each.get("risk")}
        for label, value in shown.items():
            if value is not None:
                run.outcome.setdefault(label, []).append(value)
    run.paid = measured.get("paid") or run.paid
    if alert := measured.get("alert"):  # which the watch over rounds gave after this round
        run.alerts.append(redacted({**alert, "step": run.last_step}))
    file = run.folder / "reward_report.json"  # an older one is about another run's model
    report = read_object(file) if file.is_file() and _time(file) >= since else {}
    if (report.get("trained_on") or {}).get("is_known"):  # else the report's pairs may have been trained on
        run.outcome["held-out accuracy, as saved"] = [report["accuracy"]]
    verdict = report.get("verdict") or {}
    run.passed = verdict.get("passed")
    if run.passed is False:
        what = "reward_report.json says no to the model that this run has saved:"
        run.objections = ["\n  - ".join([what, *verdict["reasons"]])]


def rounds_of(folder: Path) -> list[Path]:
    """Return the folders of an online DPO run's rounds, in order; for any other run, return its own folder."""
    rounds = [path.parent for path in folder.glob("round-*/metrics.rank0.jsonl")]
    return sorted(rounds, key=lambda path: (len(path.name), path.name)) or [folder]


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if the file holds none, is not complete or cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return a file's rows that have a step; [] if there is no file."""
    if not path.is_file():
        return []
    return [row for row in read_jsonl(path) if is_finite(row.get("step"))]


def _time(path: Path) -> float:
    return path.stat().st_mtime


def _of_this_run(rows: list[dict[str, Any]], begins: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    Return the rows without those of earlier runs, and without the older rows of steps that a resume repeated.

    `begins` has an event for the start of the run, and one for each time that it was resumed.
    """
    starts = [(begin.get("timestamp", 0), begin["step"] or -1) for begin in begins]
    return [
        row
        for row in rows
        if not any(row.get("timestamp", math.inf) < at and row["step"] > step for at, step in starts)
    ]
