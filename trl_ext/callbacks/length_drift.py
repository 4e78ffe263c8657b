"""Watch the length of completions."""

from dataclasses import dataclass

from .monitor import ABOVE_ONE, AT_LEAST_ONE, Finding, MonitorCallback


@dataclass(eq=False, kw_only=True)
class LengthDriftCallback(MonitorCallback):
    """
    Alert when completions are much longer or shorter than in the first rollouts, or when more of them are cut off.

    >>> trainer.add_callback(LengthDriftCallback(factor=2, rollouts=8))
    >>> LengthDriftCallback(factor=0.5)
    Traceback (most recent call last):
    ValueError: `factor` must be above 1, got 0.5

    Args:
        factor: alert when the mean length is above the baseline times `factor`, or below the baseline divided by it.
        clipped: alert when the share of completions that are cut off rises above the baseline by more than this.
        rollouts: number of first rollouts in the baseline.
        others: see [`MonitorCallback`].
    """

    factor: float = 1.5
    clipped: float = 0.3
    rollouts: int = 4
    runbook = "length"
    ranges = {"factor": ABOVE_ONE, "clipped": ("in (0, 1]", lambda x: 0 < x <= 1), "rollouts": AT_LEAST_ONE}

    def watch(self, logs):
        lengths = self.follow("length", self.read("length"), first=self.rollouts)
        first = lengths.first or 0.0
        advice = "Read completions: a reward that grows with length, or with brevity, is the commonest hack."
        if (mean := lengths.above(self.factor)) is not None:
            yield Finding("completions grew longer", mean, self.factor * first, advice, first)
        if (mean := lengths.below(1 / self.factor)) is not None:
            yield Finding("completions grew shorter", mean, first / self.factor, advice, first)
        cut = self.read("length_clipped", optional=True)
        shares = self.follow("length_clipped", cut, first=self.rollouts, answers=self.answers)
        if (mean := shares.above(1, self.clipped)) is not None:
            first = shares.first or 0.0
            advice = "Unfinished answers are scored like finished ones: see `missing_eos_penalty`."
            yield Finding("more completions are cut off", mean, first + self.clipped, advice, first)
