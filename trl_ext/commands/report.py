"""One self-contained HTML page of a run.

    python -m trl_ext.commands.report RUN_DIR [--output PAGE.html]

RUN_DIR is an output directory. Curves come from `metrics.rank0.jsonl` (JSONLCallback) or else from the newest
`trainer_state.json`; alerts from `alerts.jsonl`; score histograms and samples from `completions.rank*.jsonl`, which
SamplesCallback and the watches of `trl_ext.rewards` write; the configuration from JSONLCallback's first line. Of a
folder with several runs the last one is shown; steps that were done again after a resume count once.
"""

import argparse
import hashlib
import html
import importlib.util
import io
import re
import shlex
import sys
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from accelerate import PartialState
from datasets import Dataset
from transformers import TrainerCallback

from ..callbacks import JSONLCallback, SamplesCallback
from ..callbacks.alerts import RUNBOOK, is_notice
from ..callbacks.jsonl import PRIVATE_FOLDER
from ..callbacks.plot import PANELS, as_label, draw_alerts, draw_line
from ..data.texts import is_messages
from ..metrics import series
from .recorded import Run, is_finite, read_run

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
a { color: inherit; }
.tiles, .charts { display: grid; gap: .8rem; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); }
.charts { grid-template-columns: repeat(auto-fill, minmax(min(22rem, 100%), 1fr)); }
.tile { background: var(--soft); border-radius: .5rem; padding: .6rem .8rem; }
.tile b { display: block; font-size: 1.2rem; }
figure { margin: 0; background: var(--soft); border-radius: .5rem; padding: .4rem; color: var(--ink); }
svg { width: 100%; height: auto; display: block; }
table { border-collapse: collapse; width: 100%; } td, th { border-top: 1px solid var(--line); padding: .35rem .6rem;
  text-align: left; vertical-align: top; overflow-wrap: break-word; }
th, td.short { white-space: nowrap; } td.short { max-width: 16rem; overflow: hidden; text-overflow: ellipsis; }
td { overflow-wrap: anywhere; }
@media (max-width: 44rem) { .wide td { display: block; border: 0; padding: .1rem 0; max-width: none; }
  .wide th { display: none; } .wide tr { display: block; border-top: 1px solid var(--line); padding: .4rem 0; }
  .wide td[data-name]::before { content: attr(data-name) ": "; opacity: .7; } }
.act { color: var(--red); font-weight: 600; } .warn { color: var(--amber); } .none { opacity: .7; }
td.number { white-space: nowrap; font-variant-numeric: tabular-nums; } .wide { overflow-x: auto; }
"""


def _is_score(score: Any) -> bool:
    return isinstance(score, (int, float)) and abs(score) < 1e100  # what a histogram can have as a bound; no NaN


def page(run: Run) -> str:
    """The HTML."""
    generates = bool(run.samples) or "length" in run.metrics
    curves = '<p class="none">No curves: <code>pip install matplotlib</code>, which draws them.</p>'
    if can_draw := importlib.util.find_spec("matplotlib") is not None:
        curves = f'<div class="charts">{"".join(_curves(run))}</div>'
    parts = [
        f"<h1>{_text(run.folder.resolve().name)}</h1>",
        _heading(run),
        _tiles(run),
        "<h2>Alerts</h2>" + _alerts(run),
        f"<h2>Curves</h2>{curves}",
        "<h2>Scores by phase</h2>" + _histograms(run) if generates and can_draw else "",
        "<h2>Samples over time</h2>" + _samples(run) if generates else "",
        "<h2>Configuration</h2>" + _config(run),
        _runbook(run),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{_text(run.folder.name)}'
    head = f"<head>{head}</title><style>{STYLE}</style></head>"
    return f'<!doctype html><html lang="en">{head}<body>{"".join(parts)}</body></html>\n'


def _text(value: Any) -> str:
    # HTML has no such characters, and UTF-8 no half of a surrogate pair
    shown = re.sub("[\0-\b\v\f\x0e-\x1f\x7f-\x9f\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", str(value))
    return html.escape(shown)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else "–" if value is None else _text(value)


def _heading(run: Run) -> str:
    begins = [event for event in run.events if event.get("type") == "begin"]
    if not begins:
        return ""
    parts = [str(begins[-1].get("config_class", "")), f"run {begins[-1].get('run', 'without an id')}"]
    if is_finite(begins[0].get("timestamp")):
        parts.append(f"begun {datetime.fromtimestamp(begins[0]['timestamp'], UTC):%Y-%m-%d %H:%M} UTC")
    parts += [f"resumed at step {begin['step']}" for begin in begins[1:]]
    if not any(event.get("type") == "end" for event in run.events[run.events.index(begins[-1]) :]):
        parts.append("its end is not recorded: it runs, or was killed")
    return f'<p class="none">{_text(", ".join(filter(None, parts)))}</p>'


def _tiles(run: Run) -> str:
    notices = sum(map(is_notice, run.alerts))
    tiles = {"steps": str(run.last_step), "alerts": str(len(run.alerts) - notices)}
    if notices:
        tiles["notices of monitors"] = str(notices)
    for name in ("reward", "kl", "entropy", "length"):
        metric = run.metrics.get(name)
        values = series(run.history, metric.key)[1] if metric else []
        if metric and values:
            ends = [values[0], values[-1]] if len(values) > 1 else values
            tiles[f"{name}, {metric.unit}"] = " → ".join(map(_number, ends))
    return (
        '<div class="tiles">'
        + "".join(f'<div class="tile">{_text(k)}<b>{_text(v)}</b></div>' for k, v in tiles.items())
        + "</div>"
    )


def _table(classes: dict[str, str], rows: list[list[str]]) -> str:
    """A table of HTML cells, whose columns have these names and classes; on a narrow page each cell says its name."""
    head = "".join(f"<th>{name}</th>" for name in classes)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="{style}" data-name="{name}">{cell}</td>'
            for (name, style), cell in zip(classes.items(), row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _alerts(run: Run) -> str:
    if not run.alerts:
        return '<p class="none">None.</p>'
    rows = []
    for alert in run.alerts:
        style = "warn" if alert.get("action") == "warn" else "act"
        action = "notice" if is_notice(alert) else alert.get("action")
        what, advice = (_text(str(alert.get(name))[:800]) for name in ("what", "advice"))
        numbers = (_number(alert.get(name)) for name in ("value", "bound"))
        shown = f'<span class="{style}">{_text(action)}</span>'
        link = f"{advice} {_runbook_link(alert)}"
        rows.append([_text(alert["step"]), shown, _text(alert.get("monitor")), what, *numbers, link])
    columns = {"step": "number", "action": "short", "monitor": "short", "what": ""}
    return _table({**columns, "value": "number", "bound": "number", "advice": ""}, rows)


def _runbook_link(alert: dict[str, Any]) -> str:
    section = str(alert.get("runbook")).partition("#")[2]
    if section not in _runbook_sections():
        return f"({_text(str(alert.get('runbook'))[:200])})"
    return f'<a href="#runbook-{_text(section)}">What to do</a>'


def _runbook_sections() -> dict[str, list[str]]:
    """Lines of each section of the runbook; none where the package was installed without the documentation."""
    path = Path(__file__).parents[2] / RUNBOOK
    parts = path.read_text(encoding="utf-8").split("\n## ")[1:] if path.is_file() else []
    return {part.splitlines()[0].strip(): part.splitlines()[1:] for part in parts}


def _runbook(run: Run) -> str:
    """What the alerts refer to, within the page, so that the links work wherever it is taken."""
    wanted = {str(alert.get("runbook")).partition("#")[2] for alert in run.alerts}
    sections = ""
    for name, lines in _runbook_sections().items():
        rows = [line.strip(" |").split(" | ") for line in lines if line.startswith("|") and not line.startswith("|--")]
        if name in wanted and rows:
            table = "".join(f"<tr>{''.join(f'<td>{_prose(cell)}</td>' for cell in row)}</tr>" for row in rows)
            sections += (
                f'<h3 id="runbook-{_text(name)}">{_text(name)}</h3><div class="wide"><table>{table}</table></div>'
            )
    return f"<h2>What to do</h2>{sections}" if sections else ""


def _prose(markdown: str) -> str:
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", _text(markdown))
    return re.sub(r"\*([^*]+)\*", r"<em>\1</em>", re.sub(r"`([^`]+)`", r"<code>\1</code>", text))


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
        "loss": re.compile(r"(eval_)?loss"),
        "accuracy": re.compile(r"(eval_)?(mean_token_accuracy|accuracy|rewards/accuracies)"),
        "margin": re.compile(r"(eval_)?(margin|rewards/(margins|chosen|rejected))"),
        "β": re.compile(r"beta(/.+)?"),
        "gradient norm": re.compile(r"grad_norm(/.+)?"),
    }
    for title, pattern in groups.items():
        keys = sorted({key for log in run.history for key in log if pattern.fullmatch(key)})

        def lines(axes, keys=keys):
            for key in keys:
                draw_line(axes, run.history, key, key)

        charts.append(_chart(title, lines, run.alerts))
    return [chart for chart in charts if chart]


def _chart(title: str, draw: Callable, alerts: list[dict[str, Any]] = (), xlabel: str = "optimizer step") -> str:  # type: ignore[assignment]
    """A drawing as an SVG in the page's colours; "" if nothing was drawn."""
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot, whose backend is the caller's

    ink = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    salt = "c" + hashlib.sha256(title.encode("utf-8", "replace")).hexdigest()[:12]
    style: Any = dict.fromkeys(ink, INK) | {"svg.fonttype": "none", "svg.hashsalt": salt, "legend.framealpha": 0}
    # A `$` in a name begins no formula; and a browser has letters that matplotlib's font lacks
    with matplotlib.rc_context({**style, "font.size": 9, "text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure = Figure(figsize=(5.2, 3.1), layout="constrained")
        axes = figure.subplots()
        draw(axes)
        drawn = bool(axes.lines or axes.collections or axes.patches)
        if drawn:
            draw_alerts(axes, alerts)
            axes.set(title=as_label(title), xlabel=xlabel)
            axes.grid(alpha=0.25)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize="small")
        svg = io.StringIO()
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    body = svg.getvalue()
    body = body[body.index("<svg") :]

    # Colours, and ids, which are of one drawing, while the page has many; within tags, since names are text
    def in_page(tag: re.Match) -> str:
        return re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{salt}-", tag[0].replace(INK, "currentColor"))

    body = re.sub(r"<[^>]*>", in_page, body)
    return f"<figure>{body}</figure>" if drawn else ""


def _phases(run: Run) -> list[list[dict[str, Any]]]:
    third = max(run.last_step, 1) / 3
    return [[row for row in run.samples if min(int(row["step"] / third), 2) == phase] for phase in range(3)]


def _histograms(run: Run) -> str:
    phases = _phases(run)
    names = sorted({n for row in run.samples for n, s in row["scores"].items() if _is_score(s)})
    charts = []
    for name in names:
        parts = [[float(row["scores"][name]) for row in rows if _is_score(row["scores"].get(name))] for rows in phases]
        low, high = min(map(min, filter(None, parts))), max(map(max, filter(None, parts)))

        def draw(axes, parts=parts, low=low, high=high):
            for values, label, colour in zip(parts, PHASES, COLOURS, strict=True):
                if values:
                    edges = (low, high if high > low else low + 1)
                    shape = {"density": True, "histtype": "step", "linewidth": 1.4}
                    axes.hist(values, 24, range=edges, label=label, color=colour, **shape)

        charts.append(_chart(f"{name}: density of single scores", draw, xlabel="score"))
    if not charts:
        return '<p class="none">No single scores: <code>SamplesCallback</code> records some.</p>'
    return f'<div class="charts">{"".join(charts)}</div>'


def _samples(run: Run) -> str:
    if not run.samples:
        return '<p class="none">No completions: <code>SamplesCallback</code> records some.</p>'
    rows = []
    for label, phase in zip(PHASES, _phases(run), strict=True):
        merged: dict[tuple, dict[str, Any]] = {}
        for row in phase:  # several watches write the same completion
            texts = str(row.get("prompt")), str(row.get("completion"))
            merged.setdefault((row["step"], *texts), {}).update(row["scores"])
        spread = sorted({round(i * (len(merged) - 1) / (SAMPLES - 1)) for i in range(SAMPLES)} if merged else ())
        for (step, prompt, completion), scores in (list(merged.items())[i] for i in spread):
            shown = ", ".join(f"{name} {_number(s)}" for name, s in scores.items() if isinstance(s, (int, float)))
            rows.append([label, _text(step), _text(prompt[:400]), _text(completion[:800]), _text(shown[:400])])
    return _table({"phase": "short", "step": "number", "prompt": "", "completion": "", "scores": ""}, rows)


def _config(run: Run) -> str:
    if not run.config:
        return '<p class="none">Not recorded: <code>JSONLCallback</code> does.</p>'
    rows = "".join(f"<tr><td>{_text(k)}</td><td>{_text(v)}</td></tr>" for k, v in sorted(run.config.items()))
    return f"<details><summary>{len(run.config)} settings</summary><table>{rows}</table></details>"


def write_report(folder: str | Path, output: str | Path | None = None) -> Path:
    """Write the page of the run in `folder`, as `report.html` beside what it shows unless `output` says otherwise."""
    folder = Path(folder)
    text, private = page(read_run(folder)), folder / PRIVATE_FOLDER
    output = Path(output) if output else (private if private.is_dir() else folder) / "report.html"
    temporary = output.with_name(f"{output.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(output)
    return output


def report_of(folder: str | Path, was_trained: bool = True) -> str:
    """
    Write the page at the end of a script, with its last evaluation, and say in a few words where it is.

    A page that cannot be written ends nothing: the words say why.

    Args:
        folder: output directory of the run.
        was_trained: False where the run was complete already: its page stays as it is.
    """
    if not PartialState().is_main_process:
        return ""
    if not was_trained:
        found = sorted(Path(folder).glob("report.html")) + sorted(Path(folder).glob(f"{PRIVATE_FOLDER}/report.html"))
        return f"Report: {found[-1]}" if found else "No report: nothing was trained"
    try:
        return f"Report: {write_report(folder)}"
    except Exception as error:  # the model is what the run was for
        return f"No report: {' '.join(str(error).split())}"


def next_answer(folder: str | Path, rows: Dataset) -> str:
    """The command that answers the first prompt of these rows with the model in `folder`, as a shell takes it."""
    row = rows[0]
    asked = row.get("prompt", row.get("messages"))
    is_chat = is_messages(asked)
    if is_chat:
        asked = next((message["content"] for message in asked if message["role"] == "user"), None)
    is_short = isinstance(asked, str) and 0 < len(asked.strip()) <= 120 and asked.isprintable()
    prompt = shlex.quote(asked if is_short else "hello")
    command = f"python recipes/generate.py --model_name_or_path {shlex.quote(str(folder))} --prompt {prompt}"
    return f"{command} --chat true" if is_chat else command


class ReportCallback(TrainerCallback):
    """Write the page when training ends, whatever ended it."""

    def on_train_end(self, args, state, control, **kwargs):
        report_of(args.output_dir)


def record_run(trainer: Any, samples: bool = False) -> None:
    """
    Have a run record what the page shows, unless it does already, and write the page when training ends.

    Args:
        trainer: any Trainer.
        samples: whether to keep completions of each rollout, too; for PPOTrainer and RLOOTrainer.
    """
    if not any(isinstance(callback, JSONLCallback) for callback in trainer.callback_handler.callbacks):
        trainer.add_callback(JSONLCallback())
    if samples:
        trainer.add_callback(SamplesCallback(trainer=trainer))
    trainer.add_callback(ReportCallback())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m trl_ext.commands.report", description="One self-contained HTML page of a run."
    )
    parser.add_argument("run_dir", type=Path, help="output directory of a run")
    parser.add_argument("--output", type=Path, help="where to write; report.html in RUN_DIR by default")
    args = parser.parse_args(arguments)
    try:
        print(write_report(args.run_dir, args.output))
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
