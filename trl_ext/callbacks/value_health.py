"""The critic."""

from dataclasses import dataclass

from .monitor import Finding, MonitorCallback


@dataclass(eq=False, kw_only=True)
class ValueHealthCallback(MonitorCallback):
    """
    Alert when the critic explains too little of the returns' variance, or its loss grows.

    Args:
        explained_variance: lowest explained variance, mean over `rollouts`. A constant prediction has 0.
        loss_factor: alert when the value loss exceeds this factor of its mean over the first `steps`.
        rollouts: rollouts over which the explained variance is averaged. As many first ones are skipped as a warm-up.
        steps: optimizer steps over which the value loss is averaged.
        others: see [`MonitorCallback`].
    """

    explained_variance: float = 0.0
    loss_factor: float = 5.0
    rollouts: int = 5
    steps: int = 16
    runbook = "critic"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.explained_variance < 1 and self.loss_factor > 1 and self.rollouts >= 1 and self.steps >= 1):
            raise ValueError(
                "`explained_variance` must be below 1, `loss_factor` above 1, `rollouts` and `steps` 1 or more; got "
                f"{self.explained_variance}, {self.loss_factor}, {self.rollouts} and {self.steps}"
            )

    def watch(self, logs):
        explained, loss = self.read("explained_variance"), self.read("value_loss")
        if explained is not None and self.first_mean("warm-up", explained, self.rollouts) is not None:
            values = self.recent("explained_variance", explained, self.rollouts)
            mean = sum(values) / len(values)
            if len(values) == self.rollouts and mean < self.explained_variance:
                advice = "Advantages are noise: raise the critic's learning rate, or warm the critic up."
                yield Finding("the critic explains nothing", mean, self.explained_variance, advice)
        if self.is_infinite("value_loss"):
            advice = "The critic diverges: lower its learning rate, or see `reward_normalization`."
            yield Finding("the value loss grew", None, None, advice)
        if loss is not None:
            size = self.logs_in(self.steps)
            values, first = self.recent("value_loss", loss, size), self.first_mean("value_loss", loss, size)
            mean = sum(values) / len(values)
            if first is not None and mean > self.loss_factor * first:
                advice = "The scale of the rewards moved, or the critic diverges: see `reward_normalization`."
                yield Finding("the value loss grew", mean, self.loss_factor * first, advice, first)
