"""Length of completions."""

from dataclasses import dataclass

from .monitor import Finding, MonitorCallback


@dataclass(eq=False, kw_only=True)
class LengthDriftCallback(MonitorCallback):
    """
    Watches the mean length of completions against the first rollouts, and the share that is cut off.

    Args:
        factor: alert beyond `factor` times, or below 1/`factor` of, the first rollouts' mean length.
        clipped: alert where the share of completions that are cut off rose by more than this.
        rollouts: logs of rollouts that make the baseline.
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
        if length is not None:
            first = self.first_mean("length", length, self.rollouts)
            advice = "Read completions: rewards that grow with length, or with brevity, are the commonest hack."
            if first is not None and length > self.factor * first:
                yield Finding("completions grew longer", length, self.factor * first, advice, first)
            if first is not None and length < first / self.factor:
                yield Finding("completions grew shorter", length, first / self.factor, advice, first)
        if cut is not None:
            first = self.first_mean("clipped", cut, self.rollouts)
            if first is not None and cut > first + self.clipped:
                advice = "Answers that are not finished are judged all the same: see `missing_eos_penalty`."
                yield Finding("more completions are cut off", cut, first + self.clipped, advice, first)
