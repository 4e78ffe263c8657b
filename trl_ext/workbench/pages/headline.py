"""List the main quantities of a run for each trainer: their names, units and keys in the logs."""

import re
from dataclasses import dataclass

from ...callbacks import curve
from .markup import number
from .recorded import Run, is_finite


@dataclass(frozen=True)
class Quantity:
    """Describe a number that a run logs: its key, and the name and unit to show."""

    name: str
    key: str
    unit: str = ""

    @property
    def label(self) -> str:
        return f"{self.name}, {self.unit}" if self.unit else self.name


# The quantities that get a tile, in order. The keys that monitors read are in `callbacks/metrics.py`.
_SUPERVISED = (Quantity("loss", "loss", "nats per token"), Quantity("token accuracy", "mean_token_accuracy"))
_PAIRS = (
    Quantity("pair accuracy", "rewards/accuracies"),
    Quantity("margin", "rewards/margins", "nats · β"),
    Quantity("loss", "loss"),
)
HEADLINES: dict[str, tuple[Quantity, ...]] = {
    "SFTConfig": (
        *_SUPERVISED,
        Quantity("held-out loss", "eval_loss", "nats per token"),
        Quantity("held-out token accuracy", "eval_mean_token_accuracy"),
        Quantity("entropy", "entropy", "nats per token"),
    ),
    "RewardConfig": (
        Quantity("pair accuracy", "accuracy"),
        Quantity("held-out pair accuracy", "eval_accuracy"),
        Quantity("margin", "margin", "score"),
        Quantity("held-out margin", "eval_margin", "score"),
        Quantity("held-out loss", "eval_loss"),
        Quantity("loss", "loss"),
        Quantity("mean score", "mean_reward"),
    ),
    "CriticConfig": (
        Quantity("explained variance", "val/explained_variance"),
        Quantity("held-out explained variance", "eval_val/explained_variance"),
        Quantity("error, root mean square", "val/rmse", "score"),
        Quantity("held-out error, root mean square", "eval_val/rmse", "score"),
    ),
    "DPOConfig": (
        *_PAIRS,
        Quantity("held-out pair accuracy", "eval_rewards/accuracies"),
        Quantity("held-out margin", "eval_rewards/margins", "nats · β"),
        Quantity("held-out loss", "eval_loss"),
        Quantity("β", "beta"),
        Quantity("chosen answers' log-prob change", "logps/chosen_delta", "nats"),
        Quantity("drift", "logps/drift", "nats"),
    ),
    "KTOConfig": (Quantity("margin", "rewards/margins"), Quantity("loss", "loss")),
}
# For trainers that sample answers: metric → name to show. Each trainer's keys for them are in `callbacks/metrics.py`
_SAMPLED = {"reward": "score", "kl": "KL", "entropy": "entropy", "length": "length", "length_clipped": "cut off"}
_HELD_OUT = {
    "held-out score": re.compile(r"eval_(objective/scores|reward)"),
    "gold, held out": re.compile(r"eval_gold/mean|eval_rewards/[^/]*gold[^/]*/mean"),
}


def headline(run: Run) -> list[Quantity]:
    """Return the main quantities that this run has logged, the most important first."""
    keys = {key for log in run.history for key in log}
    wanted = list(HEADLINES.get(run.trainer, ()))
    if not wanted:
        units = {"reward": "", "kl": run.metrics["kl"].unit} if "kl" in run.metrics else {"reward": ""}
        for name, shown in _SAMPLED.items():
            if metric := run.metrics.get(name):
                wanted.append(Quantity(shown, metric.key, units.get(name, metric.unit)))
        held_out = [Quantity(n, k) for n, pattern in _HELD_OUT.items() for k in sorted(keys) if pattern.fullmatch(k)]
        wanted[1:1] = held_out
        wanted += [] if "reward" in run.metrics else [Quantity("loss", "loss")]
    return [quantity for quantity in wanted if quantity.key in keys]


def first_and_last(run: Run, key: str) -> list[float]:
    """Return the first and the last finite value of a key; one value if it was logged once, [] if never."""
    values = curve(run.history, key)[1]
    return [values[0], values[-1]] if len(values) > 1 else values


def shown_ends(run: Run, key: str) -> list[str]:
    """Return the values of [`first_and_last`] as texts with three significant digits."""
    values = first_and_last(run, key)
    least = 1e-6 * max(map(abs, values), default=0.0)  # smaller is shown as 0, such as a KL of 0 with rounding errors
    return [number(value if abs(value) > least else 0, 3) for value in values]


def ends(run: Run, key: str) -> str:
    """Return the first and last value of a key as a tile shows them, `0.1 → 0.5`; the last one may be `nan`."""
    shown = shown_ends(run, key)
    last = next((log[key] for log in reversed(run.history) if key in log), None)
    if last is not None and not is_finite(last):
        shown = [*shown[:1], str(last)]
    return " → ".join(shown)
