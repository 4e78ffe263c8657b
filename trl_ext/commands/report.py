"""One self-contained HTML page of a run.

    python -m trl_ext.commands.report RUN_DIR [--output PAGE.html]

RUN_DIR is an output directory. Curves come from `metrics.rank0.jsonl` (JSONLCallback) or else from the newest
`trainer_state.json`; alerts from `alerts.jsonl`; score histograms and samples from `completions.rank*.jsonl`, which
the watches of `trl_ext.rewards` write; the configuration from JSONLCallback's first line.
"""

import argparse
import html
import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..callbacks.monitor import REGISTRY
from ..callbacks.plot import PANELS, draw_alerts
from ..jsonl import read_jsonl
from ..metrics import METRICS, Metric, series

PHASES = ("first third", "second third", "last third")
COLOURS = ("tab:blue", "tab:orange", "tab:red")
INK = "#010203"  # what matplotlib draws text and axes in; the page's own colour takes its place
SAMPLES = 5  # prompts a phase
STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --soft: #f3f4f6; --line: #d0d5dc; --red: #b42318;
  --amber: #9a6700; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --paper: #14171c; --soft: #1f242b; --line: #3a414c;
  --red: #ff8f85; --amber: #e9b949; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; max-width: 75rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.tiles, .charts { display: grid; gap: .8rem; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); }
.charts { grid-template-columns: repeat(auto-fill, minmax(22rem, 1fr)); }
.tile { background: var(--soft); border-radius: .5rem; padding: .6rem .8rem; }
.tile b { display: block; font-size: 1.2rem; }
figure { margin: 0; background: var(--soft); border-radius: .5rem; padding: .4rem; color: var(--ink); }
svg { width: 100%; height: auto; display: block; }
table { border-collapse: collapse; width: 100%; } td, th { border-top: 1px solid var(--line); padding: .35rem .6rem;
  text-align: left; vertical-align: top; overflow-wrap: break-word; }
th, td.short { white-space: nowrap; }
.act { color: var(--red); font-weight: 600; } .warn { color: var(--amber); } .none { opacity: .7; }
td.number { white-space: nowrap; font-variant-numeric: tabular-nums; } .wide { overflow-x: auto; }
"""


@dataclass
class Run:
    """What a run left behind."""

    folder: Path
    history: list[dict[str, Any]]
    alerts: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    registry: dict[str, Any] = field(default_factory=dict)

    @property
    def metrics(self) -> dict[str, Metric]:
        """Of the trainer whose keys are there."""
        keys = {key for log in self.history for key in log}
        return max(METRICS.values(), key=lambda known: len({metric.key for metric in known.values()} & keys))

    @property
    def last_step(self) -> int:
        return max((row["step"] for row in (*self.history, *self.samples)), default=0)


def read_run(folder: Path) -> Run:
    """Read an output directory; raise where there is nothing of a run."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give the output directory of a run")
    states = sorted(folder.glob("**/trainer_state.json"), key=lambda path: path.stat().st_mtime)
    state = json.loads(states[-1].read_text()) if states else {}
    registry = (state.get("stateful_callbacks") or {}).get(REGISTRY, {})
    run = Run(folder, state.get("log_history", []), alerts=registry.get("alerts", []), registry=registry)
    if (folder / "metrics.rank0.jsonl").is_file():
        events = list(read_jsonl(folder / "metrics.rank0.jsonl"))
        run.history = [{**event["logs"], "step": event["step"]} for event in events if "logs" in event]
        known: dict[str, Any] = next((event["monitors"] for event in reversed(events) if "monitors" in event), {})
        run.registry = {**{name: {"args": args} for name, args in known.items()}, **run.registry}
        run.config = next((event["config"] for event in reversed(events) if event.get("type") == "begin"), {})
    if (folder / "alerts.jsonl").is_file():
        run.alerts = list(read_jsonl(folder / "alerts.jsonl"))
    run.samples = [row for path in sorted(folder.glob("completions.rank*.jsonl")) for row in read_jsonl(path)]
    run.samples = sorted((row for row in run.samples if row.get("step") is not None), key=lambda row: row["step"])
    if not (run.history or run.samples):
        raise ValueError(
            f"{folder} has neither metrics.rank0.jsonl nor a trainer_state.json nor completions.rank*.jsonl; add "
            "JSONLCallback to the script, or give the folder that a checkpoint is in"
        )
    return run


def page(run: Run) -> str:
    """The HTML."""
    parts = [
        f"<h1>{_text(run.folder.resolve().name)}</h1>",
        _tiles(run),
        "<h2>Alerts</h2>" + _alerts(run),
        '<h2>Curves</h2><div class="charts">' + "".join(_curves(run)) + "</div>",
        "<h2>Scores by phase</h2>" + _histograms(run),
        "<h2>Samples over time</h2>" + _samples(run),
        "<h2>Configuration</h2>" + _config(run),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{_text(run.folder.name)}'
    head = f"<head>{head}</title><style>{STYLE}</style></head>"
    return f'<!doctype html><html lang="en">{head}<body>{"".join(parts)}</body></html>\n'


def _text(value: Any) -> str:
    return html.escape(str(value))


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else "–" if value is None else _text(value)


def _tiles(run: Run) -> str:
    tiles = {"steps": str(run.last_step), "alerts": str(len(run.alerts))}
    for name in ("reward", "kl", "entropy", "length"):
        metric = run.metrics.get(name)
        values = series(run.history, metric.key)[1] if metric else []
        if metric and values:
            tiles[f"{name}, {metric.unit}"] = f"{_number(values[0])} → {_number(values[-1])}"
    return (
        '<div class="tiles">'
        + "".join(f'<div class="tile">{_text(k)}<b>{_text(v)}</b></div>' for k, v in tiles.items())
        + "</div>"
    )


def _alerts(run: Run) -> str:
    if not run.alerts:
        return '<p class="none">None.</p>'
    rows = ""
    for alert in run.alerts:
        style = "warn" if alert["action"] == "warn" else "act"
        rows += (
            f'<tr><td class="number">{_text(alert["step"])}</td>'
            f'<td class="short {style}">{_text(alert["action"])}</td>'
            f'<td class="short">{_text(alert["monitor"])}</td><td>{_text(alert["what"])}</td>'
            f'<td class="number">{_number(alert["value"])}</td><td class="number">{_number(alert["bound"])}</td>'
            f"<td>{_text(alert['advice'])} ({_text(alert['runbook'])})</td></tr>"
        )
    head = "".join(f"<th>{name}</th>" for name in ("step", "action", "monitor", "what", "value", "bound", "advice"))
    return f'<div class="wide"><table><tr>{head}</tr>{rows}</table></div>'


def _curves(run: Run) -> list[str]:
    charts = []
    for title, draw in PANELS.items():
        charts.append(
            _chart(title, lambda axes, draw=draw: draw(axes, run.history, run.metrics, run.registry), run.alerts)
        )
    groups = {
        "reward functions, mean": re.compile(r"rewards/.+/mean"),
        "evaluation, mean": re.compile(r"eval_(rewards/.+/mean|objective/scores|reward|gold/.+)"),
        "repetition": re.compile(r"repetition/.+"),
        "loss": re.compile(r"loss|eval_loss|grad_norm"),
    }
    for title, pattern in groups.items():
        keys = sorted({key for log in run.history for key in log if pattern.fullmatch(key)})

        def lines(axes, keys=keys):
            for key in keys:
                steps, values = series(run.history, key)
                if steps:
                    axes.plot(steps, values, marker=".", markersize=3, label=key)

        charts.append(_chart(title, lines, run.alerts))
    return [chart for chart in charts if chart]


def _chart(title: str, draw: Callable, alerts: list[dict[str, Any]] = (), xlabel: str = "optimizer step") -> str:  # type: ignore[assignment]
    """A drawing as an SVG in the page's colours; "" if nothing was drawn."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ink = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style: Any = dict.fromkeys(ink, INK) | {"svg.fonttype": "none", "svg.hashsalt": title, "legend.framealpha": 0}
    with plt.rc_context({**style, "font.size": 9}):
        figure, axes = plt.subplots(figsize=(5.2, 3.1), layout="constrained")
        draw(axes)
        drawn = bool(axes.lines or axes.collections or axes.patches)
        if drawn:
            draw_alerts(axes, alerts)
            axes.set(title=title, xlabel=xlabel)
            axes.grid(alpha=0.25)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize="small")
        svg = io.StringIO()
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
        plt.close(figure)
    body = svg.getvalue()
    body = body[body.index("<svg") :].replace(INK, "currentColor")
    # Ids are of one drawing, and the page has many
    salt = re.sub(r"\W", "", title)
    body = re.sub(r'(id="|url\(#|xlink:href="#)', rf"\g<1>{salt}-", body)
    return f"<figure>{body}</figure>" if drawn else ""


def _phases(run: Run) -> list[list[dict[str, Any]]]:
    third = max(run.last_step, 1) / 3
    return [[row for row in run.samples if min(int(row["step"] / third), 2) == phase] for phase in range(3)]


def _histograms(run: Run) -> str:
    phases = _phases(run)
    names = sorted({n for row in run.samples for n, s in row["scores"].items() if isinstance(s, (int, float))})
    charts = []
    for name in names:
        parts = [
            [row["scores"][name] for row in rows if isinstance(row["scores"].get(name), (int, float))]
            for rows in phases
        ]
        low, high = min(map(min, filter(None, parts))), max(map(max, filter(None, parts)))

        def draw(axes, parts=parts, low=low, high=high):
            for values, label, colour in zip(parts, PHASES, COLOURS, strict=True):
                if values:
                    edges = (low, high if high > low else low + 1)
                    shape = {"density": True, "histtype": "step", "linewidth": 1.4}
                    axes.hist(values, 24, range=edges, label=label, color=colour, **shape)

        charts.append(_chart(f"{name}: density of single scores", draw, xlabel="score"))
    if not charts:
        return '<p class="none">No single scores: wrap a reward in <code>score_watch</code>, or add a gold judge.</p>'
    return f'<div class="charts">{"".join(charts)}</div>'


def _samples(run: Run) -> str:
    if not run.samples:
        return '<p class="none">No completions: add a watch of <code>trl_ext.rewards</code>.</p>'
    rows = []
    for label, phase in zip(PHASES, _phases(run), strict=True):
        merged: dict[tuple, dict[str, Any]] = {}
        for row in phase:  # several watches write the same completion
            merged.setdefault((row["step"], row["prompt"], row["completion"]), {}).update(row["scores"])
        spread = sorted({round(i * (len(merged) - 1) / (SAMPLES - 1)) for i in range(SAMPLES)} if merged else ())
        for (step, prompt, completion), scores in (list(merged.items())[i] for i in spread):
            shown = ", ".join(f"{name} {_number(s)}" for name, s in scores.items() if isinstance(s, (int, float)))
            rows.append(
                f'<tr><td class="short">{label}</td><td class="number">{_text(step)}</td>'
                f"<td>{_text(prompt[:400])}</td><td>{_text(completion[:800])}</td><td>{_text(shown)}</td></tr>"
            )
    head = "".join(f"<th>{name}</th>" for name in ("phase", "step", "prompt", "completion", "scores"))
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _config(run: Run) -> str:
    if not run.config:
        return '<p class="none">Not recorded: JSONLCallback does.</p>'
    rows = "".join(f"<tr><td>{_text(k)}</td><td>{_text(v)}</td></tr>" for k, v in sorted(run.config.items()))
    return f"<details><summary>{len(run.config)} settings</summary><table>{rows}</table></details>"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m trl_ext.commands.report", description="One self-contained HTML page of a run."
    )
    parser.add_argument("run_dir", type=Path, help="output directory of a run")
    parser.add_argument("--output", type=Path, help="where to write; report.html in RUN_DIR by default")
    args = parser.parse_args(arguments)
    try:
        text = page(read_run(args.run_dir))
        output = args.output or args.run_dir / "report.html"
        output.write_text(text, encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        sys.exit(2)
    print(output)


if __name__ == "__main__":
    main()
