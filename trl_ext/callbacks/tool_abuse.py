"""Watch how a policy calls its tools."""

from dataclasses import dataclass

from .monitor import AT_LEAST_ONE, SHARE, Finding, MonitorCallback


@dataclass(eq=False, kw_only=True)
class ToolAbuseCallback(MonitorCallback):
    """
    Alert when more tool calls fail, or repeat an earlier call of their episode, than in the first rollouts.

    PPOTrainer logs failed and repeated calls, GRPOTrainer only failed calls.

    The calls of an episode depend on each other, and some episodes make many calls. So the error of a share is
    computed in two ways: as if each episode had made one call, and from the scatter of earlier logs. The larger error
    is used. The monitor therefore needs about ten logs before it can act, and far more answers than if calls were
    independent.

    >>> trainer.add_callback(ToolAbuseCallback(repeated=0.5, action="stop"))

    Args:
        failed: alert when the share of calls that fail rises above the baseline by more than this.
        repeated: alert when the share of repeated calls rises above the baseline by more than this. A call is repeated
            if the same call was made before in its episode, and got the same answer.
        rollouts: number of first rollouts in the baseline.
        others: see [`MonitorCallback`].
    """

    failed: float = 0.2
    repeated: float = 0.3
    rollouts: int = 8
    runbook = "tools"
    ranges = dict.fromkeys(("failed", "repeated"), SHARE) | {"rollouts": AT_LEAST_ONE}

    def watch(self, logs):
        calls, failed, repeated = (
            self._number(key, logs.get(key))
            for key in ("tools/call_frequency", "tools/failure_frequency", "tools/repeated_frequency")
        )
        if calls is None and not self.memory.get("found"):
            self.read("tools")  # says once if nothing is logged for a whole rollout
        self.memory["found"] = self.memory.get("found", False) or calls is not None
        if not calls:  # without calls there is no share, though a trainer may log 0
            return
        episodes = None if self.answers is None else self.answers * min(calls, 1.0)
        fails, repeats = (
            self.follow(name, share, first=self.rollouts, answers=episodes, is_clustered=True)
            for name, share in (("failed", failed), ("repeated", repeated))
        )
        advice = "Read the episodes in `completions.rank*.jsonl`: "
        if (mean := fails.above(1, self.failed)) is not None:
            first = fails.first or 0.0
            more = "check whether a tool is down, or the reward ignores what tools answer."
            yield Finding("more tool calls fail", mean, first + self.failed, advice + more, first)
        if (mean := repeats.above(1, self.repeated)) is not None:
            first = repeats.first or 0.0
            more = "check which reward pays for a call that tells nothing new."
            yield Finding("episodes repeat their tool calls", mean, first + self.repeated, advice + more, first)
