"""Watch the share of tokens whose probability ratio is clipped."""

from dataclasses import dataclass

from .monitor import AT_LEAST_ONE, SHARE, Finding, MonitorCallback


@dataclass(eq=False, kw_only=True)
class ClipFractionCallback(MonitorCallback):
    """
    Alert when too large a share of tokens (in RLOO, of responses) has a clipped probability ratio.

    >>> trainer.add_callback(ClipFractionCallback(limit=0.3, steps=32))

    Args:
        limit: alert when the share is above this.
        steps: optimizer steps over which the share is averaged.
        others: see [`MonitorCallback`].
    """

    limit: float = 0.2
    steps: int = 16
    runbook = "clip-fraction"
    ranges = {"limit": SHARE, "steps": AT_LEAST_ONE}

    def watch(self, logs):
        value = self.read("clip_fraction")
        shares = self.follow("clip_fraction", value, **self.windows(self.steps), answers=self.answers)
        if (mean := shares.above(plus=self.limit)) is not None:
            advice = "Steps are too large: lower the learning rate, or pass over a rollout fewer times."
            yield Finding(f"the clip fraction is high over {self.steps} steps", mean, self.limit, advice)
