"""Watch the entropy of the next-token distribution."""

from dataclasses import dataclass

from .monitor import AT_LEAST_ONE, NOT_NEGATIVE, Finding, MonitorCallback


@dataclass(eq=False, kw_only=True)
class EntropyFloorCallback(MonitorCallback):
    """
    Alert when the policy's entropy falls too low: a collapsed policy explores nothing.

    >>> trainer.add_callback(EntropyFloorCallback(floor=0.05, action="save"))

    Args:
        floor: alert when the entropy is below this, in nats per token.
        relative: alert when the entropy is below this share of its mean over the first `steps`.
        steps: optimizer steps over which the entropy is averaged.
        others: see [`MonitorCallback`].
    """

    floor: float = 0.1
    relative: float = 0.3
    steps: int = 16
    runbook = "entropy"
    ranges = {"floor": NOT_NEGATIVE, "relative": ("in [0, 1)", lambda x: 0 <= x < 1), "steps": AT_LEAST_ONE}

    def watch(self, logs):
        windows = self.windows(self.steps)
        entropies = self.follow("entropy", self.read("entropy"), **windows, first=windows["size"])
        first = entropies.first
        advice = "Raise `entropy_coef` or the KL coefficient. Check whether all prompts get the same answer."
        if (mean := entropies.below(plus=self.floor)) is not None:
            yield Finding("the entropy is below its floor", mean, self.floor, advice, first)
        if first is not None and (mean := entropies.below(self.relative)) is not None:
            yield Finding("the entropy fell far from where it began", mean, self.relative * first, advice, first)
