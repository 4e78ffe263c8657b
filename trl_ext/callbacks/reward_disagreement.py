"""Watch the disagreement of reward models."""

import re
from dataclasses import dataclass

from .monitor import ABOVE_ONE, AT_LEAST_ONE, Finding, MonitorCallback

KEY = re.compile(r"rewards/(.+)/disagreement")


@dataclass(eq=False, kw_only=True)
class RewardDisagreementCallback(MonitorCallback):
    """
    Alert when the reward models of an ensemble disagree more than in the first rollouts.

    Reward models disagree more on completions that are unlike their training data. This monitor reads
    `rewards/<name>/disagreement`, the spread of the members' scores of the same completions.

    >>> trainer.add_callback(RewardDisagreementCallback(factor=3, action="raise_kl"))

    Args:
        factor: alert when the disagreement is above the baseline times this factor.
        rollouts: number of first rollouts in the baseline.
        others: see [`MonitorCallback`].
    """

    factor: float = 2.0
    rollouts: int = 4
    runbook = "disagreement"
    ranges = {"factor": ABOVE_ONE, "rollouts": AT_LEAST_ONE}

    def watch(self, logs):
        keys = [key for key in logs if KEY.fullmatch(key)]
        if not keys and not self.memory.get("found"):
            self.read("disagreement")  # says once if nothing is logged for a whole rollout
        for key in keys:
            self.memory["found"] = True
            spread = self.follow(key, self._number(key, logs[key]), first=self.rollouts)
            if self._infinite.get(key):
                advice = "The disagreement is infinite: a reward model gave a score that is not finite."
                yield Finding(f"`{key}` grew", None, None, advice)
            if (mean := spread.above(self.factor)) is not None:
                first = spread.first or 0.0
                advice = (
                    "The reward models may not know such completions from their training: compare what each of them "
                    "scores highest."
                )
                yield Finding(f"`{key}` grew", mean, self.factor * first, advice, first)
