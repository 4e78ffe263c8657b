"""Draw panels, curves and alerts of a run's log with matplotlib, for pictures, notebooks and pages."""

from collections.abc import Callable

from .metrics import Metric, curve


def draw_alerts(axes, alerts) -> None:
    """Mark alerts at the foot of a panel: orange for a warning, red for an action."""
    for alert in alerts:
        colour = "tab:orange" if alert["action"] == "warn" else "tab:red"
        axes.plot(alert["step"], 0.02, "^", color=colour, transform=axes.get_xaxis_transform(), clip_on=False)


def as_label(name: str) -> str:
    """
    Return a name changed so that a legend shows it well: printable, and cut in the middle if it is too long.

    matplotlib would hide a name that begins with `_`, so such a name gets an invisible first character.
    """
    name = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name)
    name = name if len(name) <= 48 else f"{name[:30]}…{name[-17:]}"
    return f"\N{ZERO WIDTH SPACE}{name}" if name.startswith("_") else name


def draw_line(axes, history, key: str | None, label: str, **style) -> None:
    """Draw the values under a key of a `log_history` as a line with dots; draw nothing if there are none."""
    steps, values = curve(history, key)
    if steps:
        dots = {"marker": ".", "markersize": 3 if len(steps) > 1 else 8}
        axes.plot(steps, values, label=as_label(label), **{**dots, **style})


def _bound(axes, registry, monitor: str, argument: str, style: str = "--") -> None:
    value = registry.get(monitor, {}).get("args", {}).get(argument)
    if value is not None and axes.lines:
        axes.axhline(value, color="tab:red", linestyle=style, linewidth=1, label=f"{argument} {value:g}")


def _key(metrics: dict[str, Metric], quantity: str) -> str | None:
    return metrics[quantity].key if quantity in metrics else None


def _scores(axes, history, metrics, registry) -> None:
    steps, means = curve(history, _key(metrics, "reward"))
    draw_line(axes, history, _key(metrics, "reward"), "mean")
    stds = dict(zip(*curve(history, _key(metrics, "reward_std")), strict=True))
    if steps and all(step in stds for step in steps):
        low, high = ([m + sign * stds[s] for s, m in zip(steps, means, strict=True)] for sign in (-1, 1))
        axes.fill_between(steps, low, high, alpha=0.2, label="± σ of single scores")
    for key in sorted({key for log in history for key in log if key.startswith("score_watch/") and "/q" in key}):
        draw_line(axes, history, key, key.removeprefix("score_watch/"), color="tab:gray", linewidth=0.8, markersize=0)
    drift = registry.get("RewardDriftCallback")
    if drift and steps:
        memory = drift.get("attributes", {}).get("memory", {})
        count, mean, squares = memory.get("scores", [0, 0.0, 0.0])
        mean, sigma = drift["args"]["baseline"] or (mean, (squares / max(count - 1, 1)) ** 0.5)
        if sigma > 0:
            for sigmas in (drift["args"]["sigmas"], -drift["args"]["drop_sigmas"]):
                value = mean + sigmas * sigma
                axes.axhline(value, color="tab:red", linestyle="--", linewidth=1, label=f"{sigmas:+g} σ")


def _kl(axes, history, metrics, registry) -> None:
    draw_line(axes, history, _key(metrics, "kl"), metrics["kl"].unit if "kl" in metrics else "")
    if "kl" not in metrics:
        return
    for name, style in (("warn", ":"), ("limit", "--")):
        if metrics["kl"].unit == "nats per response":
            _bound(axes, registry, "KLBudgetCallback", name, style)
            continue
        # The budget is per response, and the curve per token: their ratio is the length
        budget = registry.get("KLBudgetCallback", {}).get("args", {}).get(name)
        steps, lengths = curve(history, _key(metrics, "length"))
        if budget is not None and steps:
            per_token = [budget / max(length, 1) for length in lengths]
            label = f"{name} {budget:g} nats per response ÷ length"
            axes.plot(steps, per_token, color="tab:red", linestyle=style, linewidth=1, label=label)


def _entropy(axes, history, metrics, registry) -> None:
    draw_line(axes, history, _key(metrics, "entropy"), "nats per token")
    _bound(axes, registry, "EntropyFloorCallback", "floor")


def _clip(axes, history, metrics, registry) -> None:
    draw_line(axes, history, _key(metrics, "clip_fraction"), "share clipped")
    _bound(axes, registry, "ClipFractionCallback", "limit")


def _critic(axes, history, metrics, registry) -> None:
    draw_line(axes, history, _key(metrics, "explained_variance"), "explained variance")
    if axes.lines:
        twin = axes.twinx()
        draw_line(
            twin, history, _key(metrics, "value_loss"), "value loss", color="tab:green", linewidth=0.8, alpha=0.6
        )
        twin.set_ylabel("value loss (green)")
        axes.set_zorder(1)  # above the twin, which would hide it
        axes.patch.set_visible(False)
        _bound(axes, registry, "ValueHealthCallback", "explained_variance")


def _lengths(axes, history, metrics, registry) -> None:
    for name in ("mean", "min", "max"):
        style = {} if name == "mean" else {"linewidth": 0.8, "alpha": 0.6}
        draw_line(axes, history, f"completions/{name}_length", name, **style)


PANELS: dict[str, Callable] = {
    "scores": _scores,
    "KL to the reference, nats": _kl,
    "entropy, nats per token": _entropy,
    "clip fraction": _clip,
    "critic": _critic,
    "length of completions, tokens": _lengths,
}


def draw_panel(axes, name: str, history, metrics: dict[str, Metric], registry, alerts) -> bool:
    """
    Draw the panel `name`, with bounds and alerts: one of `PANELS`, or else the curve of the key `name`.

    Return whether the run has logged anything that the panel shows.
    """
    if name in PANELS:
        PANELS[name](axes, history, metrics, registry)
    else:
        draw_line(axes, history, name, name)
    axes.set_title(name)
    axes.grid(alpha=0.3)
    is_logged = bool(axes.lines or axes.collections)
    if is_logged:
        axes.legend(fontsize="small", loc="best")
    draw_alerts(axes, alerts)
    return is_logged
