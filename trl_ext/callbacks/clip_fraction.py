"""The share of clipped updates."""

from dataclasses import dataclass

from .monitor import Finding, MonitorCallback


@dataclass(eq=False, kw_only=True)
class ClipFractionCallback(MonitorCallback):
    """
    Alert when too large a share of tokens (in RLOO, of responses) has a clipped probability ratio.

    Args:
        limit: largest share.
        steps: optimizer steps over which the share is averaged.
        others: see [`MonitorCallback`].
    """

    limit: float = 0.2
    steps: int = 16
    runbook = "clip-fraction"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 < self.limit < 1 and self.steps >= 1):
            raise ValueError(f"`limit` must lie in (0, 1), `steps` be 1 or more; got {self.limit} and {self.steps}")

    def watch(self, logs):
        value = self.read("clip_fraction")
        if value is None:
            return
        shares = self.follow("clip_fraction", value, **self.windows(self.steps), answers=self.answers)
        if shares is not None and (mean := shares.above(plus=self.limit)) is not None:
            advice = "Steps are too large: lower the learning rate, the passes over a rollout, or both."
            yield Finding(f"the clip fraction is high over {self.steps} steps", mean, self.limit, advice)
