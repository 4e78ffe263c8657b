"""The disagreement of reward models."""

import re
from dataclasses import dataclass

from .monitor import Finding, MonitorCallback

KEY = re.compile(r"rewards/(.+)/disagreement")


@dataclass(eq=False, kw_only=True)
class RewardDisagreementCallback(MonitorCallback):
    """
    Alert when the reward models of an ensemble disagree more: they do on completions unlike their training data.

    It reads `rewards/<name>/disagreement`, the spread of the members' scores of the same completions.

    Args:
        factor: alert when the disagreement exceeds `factor` times the first rollouts' mean.
        rollouts: number of first rollouts in the baseline.
        others: see [`MonitorCallback`].
    """

    factor: float = 2.0
    rollouts: int = 4
    runbook = "disagreement"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.factor > 1 and self.rollouts >= 1):
            raise ValueError(
                f"`factor` must be above 1, `rollouts` be 1 or more; got {self.factor} and {self.rollouts}"
            )

    def watch(self, logs):
        keys = [key for key in logs if KEY.fullmatch(key)]
        if not keys and not self.memory.get("found"):
            self.read("disagreement")  # says once if nothing is logged for a whole rollout
        for key in keys:
            self.memory["found"] = True
            value = self._number(key, logs[key])
            spread = None if value is None else self.follow(key, value, first=self.rollouts)
            if self._infinite.get(key):
                advice = "It is infinite: a reward model gave a score that is not finite."
                yield Finding(f"`{key}` grew", None, None, advice)
            if spread is not None and (mean := spread.above(self.factor)) is not None:
                first = spread.first or 0.0
                advice = "The reward models were not trained on such completions: compare what each scores highest."
                yield Finding(f"`{key}` grew", mean, self.factor * first, advice, first)
