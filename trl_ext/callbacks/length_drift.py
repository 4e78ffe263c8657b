"""The length of completions."""

from dataclasses import dataclass

from .monitor import Finding, MonitorCallback


@dataclass(eq=False, kw_only=True)
class LengthDriftCallback(MonitorCallback):
    """
    Alert when completions grow much longer or shorter than in the first rollouts, or more of them are cut off.

    Args:
        factor: alert when the mean length is above `factor` times, or below 1/`factor` of, the first rollouts' mean.
        clipped: alert when the share of completions that are cut off rises by more than this.
        rollouts: number of first rollouts in the baseline.
        others: see [`MonitorCallback`].
    """

    factor: float = 1.5
    clipped: float = 0.3
    rollouts: int = 4
    runbook = "length"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.factor > 1 and 0 < self.clipped <= 1 and self.rollouts >= 1):
            raise ValueError(
                "`factor` must be above 1, `clipped` lie in (0, 1], `rollouts` be 1 or more; got "
                f"{self.factor}, {self.clipped} and {self.rollouts}"
            )

    def watch(self, logs):
        length, cut = self.read("length"), self.read("length_clipped", optional=True)
        if length is not None and (lengths := self.follow("length", length, first=self.rollouts)) is not None:
            first = lengths.first or 0.0
            advice = "Read completions: a reward that grows with length, or with brevity, is the commonest hack."
            if (mean := lengths.above(self.factor)) is not None:
                yield Finding("completions grew longer", mean, self.factor * first, advice, first)
            if (mean := lengths.below(1 / self.factor)) is not None:
                yield Finding("completions grew shorter", mean, first / self.factor, advice, first)
        if cut is not None:
            shares = self.follow("length_clipped", cut, first=self.rollouts, answers=self.answers)
            if shares is not None and (mean := shares.above(1, self.clipped)) is not None:
                first = shares.first or 0.0
                advice = "Unfinished answers are scored like finished ones: see `missing_eos_penalty`."
                yield Finding("more completions are cut off", mean, first + self.clipped, advice, first)
