"""The entropy of the next-token distribution."""

from dataclasses import dataclass

from .monitor import Finding, MonitorCallback


@dataclass(eq=False, kw_only=True)
class EntropyFloorCallback(MonitorCallback):
    """
    Alert when the policy's entropy falls too low: a collapsed policy explores nothing.

    Args:
        floor: lowest entropy, nats per token.
        relative: lowest entropy as a share of the mean over the first `steps`.
        steps: optimizer steps over which the entropy is averaged.
        others: see [`MonitorCallback`].
    """

    floor: float = 0.1
    relative: float = 0.3
    steps: int = 16
    runbook = "entropy"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.floor < 0 or not 0 <= self.relative < 1 or self.steps < 1:
            raise ValueError(
                f"`floor` must be 0 or more, `relative` lie in [0, 1), `steps` be 1 or more; got {self.floor}, "
                f"{self.relative} and {self.steps}"
            )

    def watch(self, logs):
        value = self.read("entropy")
        if value is None:
            return
        windows = self.windows(self.steps)
        entropies = self.follow("entropy", value, **windows, first=windows["size"])
        if entropies is None:
            return
        first = entropies.first
        advice = "Raise `entropy_coef` or the KL coefficient; see whether all prompts get one answer."
        if (mean := entropies.below(plus=self.floor)) is not None:
            yield Finding("the entropy is below its floor", mean, self.floor, advice, first)
        if first is not None and (mean := entropies.below(self.relative)) is not None:
            yield Finding("the entropy fell far from where it began", mean, self.relative * first, advice, first)
