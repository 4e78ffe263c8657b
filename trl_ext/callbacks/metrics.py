"""List key and unit of the metrics that each trainer logs (found by running TRL 1.16), and draw them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Metric:
    """
    Describe the key under which a trainer logs a quantity.

    Args:
        key: the quantity's key in `logs`.
        unit: its unit, such as `"tokens"`; "" for none.
        std: the key of the standard deviation of single completions; None if the trainer does not log it.
    """

    key: str
    unit: str = ""
    std: str | None = None


_NORM = {"grad_norm": Metric("grad_norm")}
_LENGTH = Metric("completions/mean_length", "tokens")
_CUT = {"length_clipped": Metric("completions/clipped_ratio", "share of completions")}
_ENTROPY = {"entropy": Metric("entropy", "nats per token"), **_NORM}
_ON_POLICY = {
    "clip_fraction": Metric("clip_ratio/region_mean", "share"),
    "reward": Metric("reward", "score", "reward_std"),
    "reward_std": Metric("reward_std", "score"),
    "length": _LENGTH,
    **_CUT,
    **_ENTROPY,
}
_PAIRS = {**_ENTROPY, "margin": Metric("rewards/margins", "nats × β")}

# Name of the trainer's config, which callbacks are given → quantity → key, unit. The trainers compute
# all of these over all processes.
METRICS: dict[str, dict[str, Metric]] = {
    "PPOConfig": {
        "kl": Metric("objective/kl", "nats per completion", "objective/kl_std"),
        "entropy": Metric("policy/entropy_avg", "nats per token", "policy/entropy_std"),
        "clip_fraction": Metric("policy/clipfrac_avg", "share of tokens"),
        "reward": Metric("objective/scores", "score", "objective/scores_std"),
        "reward_std": Metric("objective/scores_std", "score"),
        "length": replace(_LENGTH, std="completions/std_length"),
        **_CUT,
        "explained_variance": Metric("val/explained_variance"),
        "value_loss": Metric("loss/value_avg", "score²", "loss/value_std"),
        **_NORM,
        "episodes": Metric("episode", "episodes"),
    },
    "CriticConfig": {
        "explained_variance": Metric("val/explained_variance"),
        "value_loss": Metric("loss/value_avg", "score²"),
        **_NORM,
    },
    # Their `kl` is a mean over tokens. They log it only if `beta` is not 0.
    "RLOOConfig": {**_ON_POLICY, "kl": Metric("kl", "nats per token")},
    "GRPOConfig": {**_ON_POLICY, "kl": Metric("kl", "nats per token")},
    "DPOConfig": {**_PAIRS, "accuracy": Metric("rewards/accuracies", "share of pairs")},
    "KTOConfig": _PAIRS,  # without `kl`: an estimate over mismatched pairs, clamped at 0, which no budget can bound
    "SFTConfig": {**_ENTROPY, "accuracy": Metric("mean_token_accuracy", "share of tokens")},
    "RewardConfig": {
        "accuracy": Metric("accuracy", "share of pairs"),
        "margin": Metric("margin", "score"),
        **_NORM,
    },
}


def metrics_of(args: Any) -> dict[str, Metric]:
    """Return the quantities in `METRICS` that the trainer with the config `args` logs; {} for an unknown trainer."""
    return next((METRICS[cls.__name__] for cls in type(args).__mro__ if cls.__name__ in METRICS), {})


def rollout_steps(args: Any) -> int:
    """
    Return the number of optimizer steps from one rollout to the next, for a trainer with the config `args`; 1 if it
    has no rollouts.
    """
    micro_batches = getattr(args, "steps_per_generation", None) or 1
    passes = getattr(args, "num_ppo_epochs", None) or getattr(args, "num_iterations", None) or 1
    return math.ceil(micro_batches * passes / args.gradient_accumulation_steps)


def completions_in_log(args: Any, logging_steps: int) -> float | None:
    """
    Return the number of independent completions that a mean in a log was taken over; None if this is unknown.

    It is assumed that a rollout has begun since the log before. Completions of one prompt may be alike, so a prompt
    counts once. If only a critic is trained, each row of the data counts.

    Args:
        logging_steps: optimizer steps from one log to the next.
    """
    if completions := getattr(args, "generation_batch_size", None):
        rollouts = max(1, logging_steps // rollout_steps(args))
        return max(1, completions // (getattr(args, "num_generations", None) or 1)) * rollouts
    if "explained_variance" in metrics_of(args):
        return args.train_batch_size * args.gradient_accumulation_steps * args.world_size * logging_steps
    return None


def numbers_in(logs: dict[str, Any]) -> dict[str, float]:
    """Return the entries of these logs that are numbers, converted from NumPy's and torch's types to Python's."""
    plain = {key: value.tolist() if hasattr(value, "tolist") else value for key, value in logs.items()}
    return {key: value for key, value in plain.items() if isinstance(value, (int, float))}


def is_training_log(logs: dict[str, Any]) -> bool:
    """Return whether a log is about training steps, which is when it has a learning rate."""
    return "learning_rate" in logs


def curve(history: list[dict[str, Any]], key: str | None) -> tuple[list[int], list[float]]:
    """
    Return two lists: the steps at which `history` has a finite value under `key`, and these values. `history` is a
    `trainer.state.log_history`. With None for the `key`, both lists are empty.

    If a step has several values, the last one is taken.
    """
    points = {log["step"]: log[key] for log in history if key and isinstance(log.get(key), (int, float))}
    steps = [step for step in sorted(points) if math.isfinite(points[step])]
    return steps, [points[step] for step in steps]


# ---- Drawing ----


def draw_alerts(axes, alerts) -> None:
    """
    Mark alerts, as `alerts.jsonl` has them, at the bottom of the matplotlib plot `axes`: orange for a warning, red for
    an action.
    """
    for alert in alerts:
        colour = "tab:orange" if alert["action"] == "warn" else "tab:red"
        axes.plot(alert["step"], 0.02, "^", color=colour, transform=axes.get_xaxis_transform(), clip_on=False)


def printable(text: str) -> str:
    """Return the text with U+FFFD in place of each character that cannot be printed, such as a line end."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def as_label(name: str) -> str:
    """
    Return a name in a form for legends: printable, and shortened in the middle to at most 48 characters.

    matplotlib would hide a name that begins with `_`, so such a name gets an invisible first character.
    """
    name = printable(name)
    name = name if len(name) <= 48 else f"{name[:30]}…{name[-17:]}"
    return f"\N{ZERO WIDTH SPACE}{name}" if name.startswith("_") else name


def draw_line(axes, history, key: str | None, label: str, **style) -> None:
    """
    Draw the values under `key` of a `log_history` as a line with dots; draw nothing if there are none.

    Args:
        axes: the matplotlib plot to draw on.
        history: the logs, `trainer.state.log_history`.
        key: the metric's name; None draws nothing.
        **style: arguments of `axes.plot`.
    """
    steps, values = curve(history, key)
    if steps:
        dots = {"marker": ".", "markersize": 3 if len(steps) > 1 else 8}
        axes.plot(steps, values, label=as_label(label), **{**dots, **style})


def _panel(
    lines: dict[str, str],  # quantity or log key → label
    monitor: str = "",  # class name of a monitor, whose `arguments` are drawn as horizontal lines
    *arguments: str,
) -> Callable:
    """Return the function `draw(axes, history, metrics, registry)` of a panel."""

    def draw(axes, history, metrics, registry) -> None:
        for name, label in lines.items():
            key = name if "/" in name else None
            if name in metrics:
                key = metrics[name].key
            draw_line(axes, history, key, label)
        bounds = registry.get(monitor, {}).get("args", {})
        # A budget is per completion, so that a KL per token has none
        if axes.lines and ("kl" not in lines or metrics["kl"].unit == "nats per completion"):
            for argument in filter(bounds.get, arguments):
                axes.axhline(bounds[argument], color="tab:red", linewidth=1, label=f"{argument} {bounds[argument]:g}")

    return draw


PANELS: dict[str, Callable] = {
    "scores": _panel({"reward": "mean", "reward_std": "σ of single scores"}),
    "KL to the reference, nats": _panel({"kl": "KL"}, "KLBudgetCallback", "limit", "warn"),
    "entropy, nats per token": _panel({"entropy": "entropy"}, "EntropyFloorCallback", "floor"),
    "size of a step": _panel(
        {
            "clip_fraction": "share clipped",
            "policy/step_kl": "KL, nats per choice",
            "policy/step_kl_target": "the KL's target",
        },
        "ClipFractionCallback",
        "limit",
    ),
    "critic": _panel(
        {"explained_variance": "explained variance", "value_loss": "value loss"},
        "ValueHealthCallback",
        "explained_variance",
    ),
    "length of completions, tokens": _panel({f"completions/{name}_length": name for name in ("mean", "min", "max")}),
}
