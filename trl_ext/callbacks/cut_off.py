"""Watch the share of completions that are cut off."""

from dataclasses import dataclass

from .monitor import AT_LEAST_ONE, SHARE, Finding, MonitorCallback


@dataclass(eq=False, kw_only=True)
class CutOffCallback(MonitorCallback):
    """
    Alert when nearly all completions are cut off at the length limit, from the first rollout on or later.

    `LengthDriftCallback` compares with the first rollouts, so it is silent where these were cut off, too.

    >>> trainer.add_callback(CutOffCallback(limit=0.5, action="stop"))

    Args:
        limit: largest share.
        rollouts: rollouts over which the share is averaged.
        others: see [`MonitorCallback`].
    """

    limit: float = 0.8
    rollouts: int = 4
    runbook = "cut-off"
    ranges = {"limit": SHARE, "rollouts": AT_LEAST_ONE}

    def watch(self, logs):
        value = self.read("length_clipped")
        shares = self.follow("length_clipped", value, size=self.rollouts, answers=self.answers)
        if (mean := shares.above(plus=self.limit)) is not None:
            advice = "Raise `max_completion_length`, or teach the policy to end its answers (SFT with EOS)."
            yield Finding("most completions are cut off", mean, self.limit, advice)
