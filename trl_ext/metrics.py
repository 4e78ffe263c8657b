"""Which key each trainer logs a quantity under, in which unit, and how often: found by running TRL 1.16."""

import math
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Metric:
    """A key of `logs`. Cadence `rollout`: it is in those logs only that cover the start of a rollout."""

    key: str
    unit: str
    cadence: Literal["rollout", "step"]


_NORM = Metric("grad_norm", "", "step")
_LENGTH = Metric("completions/mean_length", "tokens", "rollout")
_CLIPPED_LENGTH = Metric("completions/clipped_ratio", "share of completions", "rollout")
_ENTROPY = Metric("entropy", "nats per token", "step")
_ON_POLICY = {
    "entropy": _ENTROPY,
    "clip_fraction": Metric("clip_ratio/region_mean", "share", "step"),
    "reward": Metric("reward", "score", "rollout"),
    "reward_std": Metric("reward_std", "score", "rollout"),
    "length": _LENGTH,
    "length_clipped": _CLIPPED_LENGTH,
    "grad_norm": _NORM,
}

# By the name of the trainer's config, as callbacks are given it: trainer → quantity → key, unit, cadence. All of them
# are taken over all processes by the trainer.
METRICS: dict[str, dict[str, Metric]] = {
    "PPOConfig": {
        "kl": Metric("objective/kl", "nats per response", "rollout"),
        "entropy": Metric("policy/entropy_avg", "nats per token", "step"),
        "clip_fraction": Metric("policy/clipfrac_avg", "share of tokens", "step"),
        "reward": Metric("objective/scores", "score", "rollout"),
        "reward_std": Metric("objective/scores_std", "score", "rollout"),
        "length": _LENGTH,
        "length_clipped": _CLIPPED_LENGTH,
        "explained_variance": Metric("val/explained_variance", "", "rollout"),
        "value_loss": Metric("loss/value_avg", "score²", "step"),
        "grad_norm": _NORM,
    },
    # Their `kl` is a mean over tokens, and there only where `beta` is not 0
    "RLOOConfig": {**_ON_POLICY, "kl": Metric("kl", "nats per token", "rollout")},
    "GRPOConfig": {**_ON_POLICY, "kl": Metric("kl", "nats per token", "step")},
    "DPOConfig": {"entropy": _ENTROPY, "grad_norm": _NORM},
    # KTO's `kl` is an estimate over mismatched pairs, clamped at 0, in no relation to a budget: left out
    "KTOConfig": {"entropy": _ENTROPY, "grad_norm": _NORM},
    "SFTConfig": {"entropy": _ENTROPY, "grad_norm": _NORM},
    "RewardConfig": {"grad_norm": _NORM},
}

# Also taken over all processes: what reward functions score and log, by TRL's `log_metric`, and the Trainer's own
_GATHERED_PREFIXES = ("rewards/", "repetition/", "score_watch/", "phrase_review/", "gold/", "eval_", "completions/")
_GATHERED = {metric.key for metrics in METRICS.values() for metric in metrics.values()} | {"loss", "learning_rate"}


def is_gathered(key: str) -> bool:
    """Whether every process sees the same number under this key."""
    return key in _GATHERED or key.startswith(_GATHERED_PREFIXES)


def metrics_of(args: Any) -> dict[str, Metric]:
    """The quantities of the trainer that `args` is the config of, by the names of its classes; {} if none is known."""
    return next((METRICS[cls.__name__] for cls in type(args).__mro__ if cls.__name__ in METRICS), {})


def rollout_steps(args: Any) -> int:
    """Optimizer steps from one rollout to the next; 1 where nothing is generated."""
    micro_batches = getattr(args, "steps_per_generation", None) or 1
    passes = getattr(args, "num_ppo_epochs", None) or getattr(args, "num_iterations", None) or 1
    return math.ceil(micro_batches * passes / args.gradient_accumulation_steps)


def is_training_log(logs: dict[str, Any]) -> bool:
    """Whether these are the Trainer's logs of training steps; those of evaluations and of the end have no rate."""
    return "learning_rate" in logs


def series(history: list[dict[str, Any]], key: str | None) -> tuple[list[int], list[float]]:
    """Steps and finite values of a key in a `log_history`; of a step that was logged twice, as after a resume, the
    last."""
    points = {log["step"]: log[key] for log in history if key and isinstance(log.get(key), (int, float))}
    steps = [step for step in sorted(points) if math.isfinite(points[step])]
    return steps, [points[step] for step in steps]
