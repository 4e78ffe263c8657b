"""Draw curves as SVG, in the colours of the page that contains them."""

import hashlib
import io
import re
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from markupsafe import Markup, escape

from ...callbacks import PANELS, as_label, draw_alerts, draw_line
from .recorded import Run

INK = "#010203"  # what matplotlib draws text and axes in; `chart` replaces it by the page's own colour
# Okabe and Ito's colours, which colour-blind people can tell apart, without yellow, which is too pale on white paper.
# A run differs by its line, too: for print in black, and since an eighth run has the first one's colour.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", INK)
LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (1, 1)))

# Title → pattern of the keys whose curves a chart has
GROUPS = {
    "reward functions, mean": r"rewards/.+/mean",
    "disagreement of reward functions": r"rewards/.+/disagreement",
    "answers that reward functions failed on or rejected, share": r"rewards/.+/(failed|rejected|unchecked|violations)",
    "evaluation, mean": r"eval_(rewards/.+/mean|objective/scores|reward|gold/.+)",
    "repetition": r"repetition/.+",
    "turns and tool calls of an episode": r"(eval_)?(turns/mean|tools/call_frequency)",
    "tool calls that fail, share": r"(eval_)?tools/failure_frequency",
    "tool calls that repeat an earlier one, share": r"(eval_)?tools/repeated_frequency",
    "score by environment": r"(eval_)?environment/.+/return",
    "loss": r"(eval_)?loss",
    "pair accuracy": r"(eval_)?(accuracy|rewards/accuracies)",
    "margin": r"(eval_)?(margin|rewards/margins)",
    "token accuracy": r"(eval_)?mean_token_accuracy",
    "rewards of the pairs' answers": r"(eval_)?rewards/(chosen|rejected)",
    "scores of the reward model": r"(eval_)?(mean|min|max)_reward",
    "log-probs against the reference, nats": r"(eval_)?logps/(chosen_delta|drift)",
    "pairs whose chosen answer fell, share": r"(eval_)?logps/displacement_rate",
    "β": r"beta(/.+)?",
    "KL coefficient": r"objective/kl_coef",
    "risk of a hack": r"watch/risk",
    "part of the reward's rise": r"attribution/(?!rise).+",
    "gradient norm": r"grad_norm(/.+)?",
    "factor on the learning rate": r"learning_rate/factor",
}
# First parts of the keys that trainers log, with `eval_` or without; all others are metrics of the user's own
KNOWN = {
    *"attribution beta clip_ratio completions environment gold grad_norm learning_rate logits logps".split(),
    *"loss objective policy profiling repetition rewards sampling time tools turns val vespo watch".split(),
}
LINES_OF_ONE = 8  # a chart has at most so many lines
# The charts that come first for a run without a reward; for a run with one those in PANELS come first
FIRST = ("loss", "pair accuracy", "margin", "token accuracy")


def line_style(place: int) -> dict[str, Any]:
    """Return matplotlib's arguments `color` and `linestyle` for run number `place`, from 0, of a comparison."""
    return {
        "color": COLOURS[place % len(COLOURS)],
        "linestyle": LINES[(place + place // len(COLOURS)) % len(LINES)],
    }


def curves(run: Run) -> list[str]:
    """
    Return the charts of one run as SVG: the quantities that monitors watch, each group of related metrics, and the
    user's own metrics.
    """
    given = {"history": run.history, "metrics": run.metrics, "registry": run.registry}
    draw: dict[str, Callable] = {title: partial(panel, **given) for title, panel in PANELS.items()}
    logged = sorted(run.keys)
    groups = {title: [key for key in logged if re.fullmatch(pattern, key)] for title, pattern in GROUPS.items()}
    for key in logged:
        first, slash, _ = key.partition("/")
        if slash and first.removeprefix("eval_") not in KNOWN:
            groups.setdefault(first, []).append(key)
    for title, keys in groups.items():
        if not keys:  # to draw an empty chart takes time, too
            continue
        cut = f"{title} (the first {LINES_OF_ONE} of {len(keys)})" if len(keys) > LINES_OF_ONE else title
        draw[cut] = partial(_lines, history=run.history, keys=keys[:LINES_OF_ONE])
    if "reward" not in run.metrics:
        draw = {title: draw[title] for title in FIRST if title in draw} | draw
    return list(filter(None, (chart(title, each, run.alerts) for title, each in draw.items())))


def paid_curves(run: Run) -> list[str]:
    """Return a list of one chart, of the features that the reward paid for most, by step; [] if none are known."""

    def draw(axes: Any) -> None:
        for each in run.paid:
            steps, values = zip(*each["curve"], strict=True)
            highest = 1.0 if each["is_share"] else max(map(abs, values)) or 1.0
            label = each["what"] if each["is_share"] else f"{each['what']} ÷ {highest:.3g}"
            axes.plot(steps, [value / highest for value in values], marker=".", markersize=3, label=as_label(label))

    return [chart("share of answers", draw, run.alerts)] if run.paid else []


def _lines(axes: Any, history: list[dict[str, Any]], keys: list[str]) -> None:
    """Draw the curve of each key in a log: solid those of training, on top those of evaluations in other styles."""
    for place, key in enumerate(sorted(keys, key=lambda key: key.startswith("eval_"))):
        line = LINES[place % len(LINES)] if key.startswith("eval_") else "-"
        draw_line(axes, history, key, key, linestyle=line)


def chart(
    title: str,
    draw: Callable[[Any], None],
    alerts: Sequence[dict[str, Any]] = (),
    xlabel: str = "optimizer step",
) -> str:
    """
    Return a chart as an SVG in the page's colours; "" if `draw` draws nothing.

    Args:
        title: title above the chart.
        draw: function that draws on the matplotlib axes that it is given.
        alerts: alerts to mark in the chart, as [`Run`] has them.
        xlabel: label of the horizontal axis.
    """
    import matplotlib
    from cycler import cycler
    from matplotlib.figure import Figure  # not pyplot, whose backend is the caller's
    from matplotlib.ticker import MaxNLocator

    ink = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    salt = "c" + hashlib.sha256(title.encode("utf-8", "replace")).hexdigest()[:12]
    style: Any = dict.fromkeys(ink, INK) | {"svg.fonttype": "none", "svg.hashsalt": salt, "legend.framealpha": 0}
    style |= {"axes.prop_cycle": cycler(color=COLOURS), "axes.spines.top": False, "lines.linewidth": 1.7}
    # A `$` in a name must not begin a formula
    with matplotlib.rc_context({**style, "font.size": 11, "text.parse_math": False}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that matplotlib's font lacks; the browser's has them
        figure = Figure(figsize=(5.2, 3.3), layout="constrained")
        axes = figure.subplots()
        draw(axes)
        if not (axes.lines or axes.collections or axes.patches):
            return ""
        draw_alerts(axes, alerts)
        axes.set_title(as_label(title), fontsize=12)
        axes.set_xlabel(xlabel)
        axes.grid(alpha=0.25)
        if xlabel == "optimizer step":
            axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
        axes.spines["right"].set_visible(len(figure.axes) > 1)
        handles, labels = axes.get_legend_handles_labels()
        if labels:  # within the axes a legend would cover curves
            columns = 1 + sum(max(map(len, labels)) <= length for length in (24, 14))
            figure.set_figheight(3.1 + 0.2 * -(-len(labels) // columns))
            figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=10)
        svg = io.StringIO()
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    body = svg.getvalue()
    body = body[body.index("<svg") :]

    # Replace colours and ids in tags only: text between tags has names, which must stay as they are. Ids get a prefix,
    # since no two drawings in a page may have the same id
    def in_page(tag: re.Match) -> str:
        return re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{salt}-", tag[0].replace(INK, "currentColor"))

    body = re.sub(r"<[^>]*>", in_page, body)
    # A label for those who cannot see the drawing; its numbers are in the tiles
    labelled = f'<svg role="img" aria-label="{escape(as_label(title))}"'
    return Markup(body.replace("<svg", labelled, 1))
