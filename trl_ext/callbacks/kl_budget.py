"""The KL to the reference, in nats summed over a response."""

from dataclasses import dataclass

from ..metrics import rollout_steps
from .monitor import Finding, MonitorCallback


@dataclass(eq=False, kw_only=True)
class KLBudgetCallback(MonitorCallback):
    """
    Alert when KL(policy ‖ reference), summed over a response, exceeds its budget.

    A KL logged per token (GRPO, RLOO) is multiplied by the mean length. That is approximate, and the alert says so.

    Args:
        warn: nats per response above which the monitor warns.
        limit: nats per response above which it acts.
        tolerance: nats per response. The first rollout's policy is the reference, so its KL is 0 but for rounding. If
            it is off by more, the reference is wrong. A KL below −`tolerance` at any time means that another policy
            sampled. Both raise an alert.
        others: see [`MonitorCallback`].
    """

    warn: float = 5.0
    limit: float = 10.0
    tolerance: float = 0.5
    runbook = "kl"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.warn <= self.limit:
            raise ValueError(f"`warn` must be above 0 and at most `limit`, got {self.warn} and {self.limit}")
        if not self.tolerance > 0:
            raise ValueError(f"`tolerance` must be above 0 nats, got {self.tolerance}")

    def watch(self, logs):
        kl, unit = self.read("kl"), ""
        metric = self._known.get("kl")
        if metric is not None and metric.unit == "nats per token" and "kl" not in self.keys:
            length = self.read("length")
            self.memory["length"] = self.memory.get("length") if length is None else length
            if kl is None or self.memory["length"] is None:
                return
            kl, unit = kl * self.memory["length"], " (approximate: mean per token × mean length)"
        if kl is None:
            return
        is_first, self.memory["started"] = not self.memory.get("started", False), True
        if is_first and self.step <= rollout_steps(self._args) and abs(kl) > self.tolerance:
            advice = "The policy is still untrained, so the reference is not the model that it started from."
            yield Finding(f"the first rollout's KL is not 0{unit}", kl, self.tolerance, advice, acts=False)
        elif kl < -self.tolerance:
            advice = "A KL is never negative: the policy that sampled is not the one that gave the log-probs."
            yield Finding(f"the KL is negative{unit}", kl, -self.tolerance, advice, acts=False)
        if kl > self.limit:
            advice = "Read completions; raise the KL coefficient, or stop and keep an earlier checkpoint."
            yield Finding(f"the KL is over its budget{unit}", kl, self.limit, advice)
        elif kl > self.warn:
            advice = "Read completions: far from the reference, a reward model is less reliable."
            yield Finding(f"the KL nears its budget{unit}", kl, self.warn, advice, acts=False)
