"""Draw panels, curves and alerts of a run's log with matplotlib, for pictures, notebooks and pages, without torch."""

from collections.abc import Callable

from .metrics import curve


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


def _quantity(quantity: str, label: str, monitor: str = "", *arguments: str) -> Callable:
    """Return a function that draws a quantity's curve, and the bounds that arguments of a monitor give it."""

    def draw(axes, history, metrics, registry) -> None:
        draw_line(axes, history, metrics[quantity].key if quantity in metrics else None, label)
        given = registry.get(monitor, {}).get("args", {})
        for argument, style in zip(arguments, ("--", ":"), strict=False):
            if axes.lines and argument in given:
                bound = {"linestyle": style, "linewidth": 1, "label": f"{argument} {given[argument]:g}"}
                axes.axhline(given[argument], color="tab:red", **bound)

    return draw


def _scores(axes, history, metrics, registry) -> None:
    _quantity("reward", "mean")(axes, history, metrics, registry)
    if "reward" in metrics:
        steps, means = curve(history, metrics["reward"].key)
        stds = dict(zip(*curve(history, metrics["reward_std"].key), strict=True))
        if steps and stds.keys() >= {*steps}:
            low, high = ([m + sign * stds[s] for s, m in zip(steps, means, strict=True)] for sign in (-1, 1))
            axes.fill_between(steps, low, high, alpha=0.2, label="± σ of single scores")


def _kl(axes, history, metrics, registry) -> None:
    unit = metrics["kl"].unit if "kl" in metrics else ""
    # A budget is per response, so that a curve per token has none
    bounds = ("limit", "warn") if unit == "nats per response" else ()
    _quantity("kl", unit, "KLBudgetCallback", *bounds)(axes, history, metrics, registry)


def _critic(axes, history, metrics, registry) -> None:
    _quantity("explained_variance", "explained variance", "ValueHealthCallback", "explained_variance")(
        axes, history, metrics, registry
    )
    if axes.lines:
        twin = axes.twinx()
        draw_line(twin, history, metrics["value_loss"].key, "value loss", color="tab:green", linewidth=0.8, alpha=0.6)
        twin.set_ylabel("value loss (green)")
        axes.set_zorder(1)  # above the twin, which would hide it
        axes.patch.set_visible(False)


def _lengths(axes, history, metrics, registry) -> None:
    for name in ("mean", "min", "max"):
        draw_line(axes, history, f"completions/{name}_length", name, linewidth=1.5 if name == "mean" else 0.8)


PANELS: dict[str, Callable] = {
    "scores": _scores,
    "KL to the reference, nats": _kl,
    "entropy, nats per token": _quantity("entropy", "nats per token", "EntropyFloorCallback", "floor"),
    "clip fraction": _quantity("clip_fraction", "share clipped", "ClipFractionCallback", "limit"),
    "critic": _critic,
    "length of completions, tokens": _lengths,
}
