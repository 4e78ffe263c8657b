"""Watch the share of completions that are cut off."""

from dataclasses import dataclass

from .monitor import AT_LEAST_ONE, SHARE, Finding, MonitorCallback


@dataclass(eq=False, kw_only=True)
class CutOffCallback(MonitorCallback):
    """
    Alert when too large a share of completions is cut off at the maximum length.

    This also finds completions that are cut off from the first rollout on. `LengthDriftCallback`, which compares with
    the first rollouts, does not.

    >>> trainer.add_callback(CutOffCallback(limit=0.5, action="stop"))

    Args:
        limit: alert when the share is above this.
        rollouts: number of rollouts over which the share is averaged.
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
            advice = (
                "Look how answers end: where the model writes another token than EOS, set `stop_token_id` to it. Else "
                "raise `max_completion_length`, or teach the policy to end its answers (SFT with EOS)."
            )
            yield Finding("most completions are cut off", mean, self.limit, advice)
