"""Watch the critic's explained variance and its loss."""

import math
from dataclasses import dataclass
from typing import Any

from ..functional import unexplained_error
from .monitor import ABOVE_ONE, AT_LEAST_ONE, Finding, MonitorCallback


@dataclass(eq=False, kw_only=True)
class ValueHealthCallback(MonitorCallback):
    """
    Alert when the critic explains too little of the returns' variance, or its loss grows.

    >>> trainer.add_callback(ValueHealthCallback(explained_variance=0.1))

    Args:
        explained_variance: alert when the explained variance is below this. A constant prediction has 0. A new critic
            may have less: while its explained variance rises, no alert is raised.
        loss_factor: alert when the value loss is above its mean over the first `steps` times this factor.
        rollouts: fewest rollouts over which the explained variance is averaged. As many rollouts at the start are
            skipped as a warm-up.
        steps: optimizer steps over which the value loss is averaged.
        others: see [`MonitorCallback`].
    """

    explained_variance: float = 0.0
    loss_factor: float = 5.0
    rollouts: int = 5
    steps: int = 16
    runbook = "critic"
    ranges = {
        "explained_variance": ("below 1", lambda x: x < 1),
        "loss_factor": ABOVE_ONE,
        "rollouts": AT_LEAST_ONE,
        "steps": AT_LEAST_ONE,
    }

    def watch(self, logs):
        explained, loss = self.read("explained_variance"), self.read("value_loss")
        if explained is not None:
            self.memory["warm_up"] = self.memory.get("warm_up", 0) + 1
        if explained is not None and self.memory["warm_up"] > self.rollouts:
            # The unexplained part is a ratio of variances, and the standard error of its logarithm is known
            left, answers = math.log(max(1 - explained, 1e-9)), self.answers or 0
            noise: dict[str, Any] = {"error": unexplained_error(answers)} if answers > 1 else {}
            rest = self.follow("explained_variance", left, size=self.rollouts, **noise)
            mean = rest.above(plus=math.log(1 - self.explained_variance))
            if mean is not None and not rest.falls:
                advice = "Advantages are noise: raise the critic's learning rate, or warm the critic up."
                yield Finding("the critic explains nothing", -math.expm1(mean), self.explained_variance, advice)
        if self.is_infinite("value_loss"):
            advice = "The critic diverges: lower its learning rate, or see `reward_normalization`."
            yield Finding("the value loss grew", None, None, advice)
        windows = self.windows(self.steps)
        losses = self.follow("value_loss", loss, **windows, first=windows["size"])
        if (mean := losses.above(self.loss_factor)) is not None:
            first = losses.first or 0.0
            advice = "The scale of the rewards moved, or the critic diverges: see `reward_normalization`."
            yield Finding("the value loss grew", mean, self.loss_factor * first, advice, first)
