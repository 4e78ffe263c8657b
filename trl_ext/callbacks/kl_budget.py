"""Watch the KL to the reference, in nats summed over a response."""

from dataclasses import dataclass

from .metrics import rollout_steps
from .monitor import Finding, MonitorCallback


@dataclass(eq=False, kw_only=True)
class KLBudgetCallback(MonitorCallback):
    """
    Alert when KL(policy ‖ reference), summed over a response, exceeds its budget.

    A KL that is logged per token (GRPO, RLOO) is multiplied by the mean length. The product is approximate; the alert
    says so, and gives the KL and the bound per token, too.

    >>> budget = KLBudgetCallback(limit=10, action="stop")
    >>> budget.warn
    5.0
    >>> trainer.add_callback(budget)

    Args:
        warn: nats per response above which the monitor warns. The default is half of `limit`.
        limit: nats per response above which the monitor acts.
        tolerance: nats per response that rounding may change the KL by. In the first rollout the policy is still the
            reference. If the KL differs from 0 by more there, the monitor warns, since the reference is wrong. It also
            warns if a later KL is below −`tolerance`, since another policy has then sampled the answers.
        others: see [`MonitorCallback`].
    """

    warn: float | None = None
    limit: float = 10.0
    tolerance: float = 0.5
    runbook = "kl"
    ranges = {"tolerance": ("above 0 nats", lambda x: x > 0)}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.warn = self.limit / 2 if self.warn is None else self.warn
        if not 0 < self.warn <= self.limit:
            raise ValueError(f"`warn` must be above 0 and at most `limit`, got {self.warn} and {self.limit}")

    def watch(self, logs):
        kl, unit, length = self.read("kl"), "", None
        metric, warn = self._known.get("kl"), self.warn or self.limit
        if self.is_infinite("kl"):
            advice = "The KL is infinite: the policy or the reference gives a sampled token the probability 0."
            yield Finding("the KL is over its budget", None, self.limit, advice)
        if metric is not None and metric.unit == "nats per token" and "kl" not in self.keys:
            length = self.read("length")
            length = self.memory["length"] = self.memory.get("length") if length is None else length
            if length is None or kl is None:
                return
            kl, unit = kl * length, " (approximate: mean per token × mean length)"
        if kl is None:
            return
        # A budget, unlike a baseline, has no error of its own. Where the spread is unknown, each log is taken as exact
        kls = self.follow("kl", kl, **(self.noise("kl") or {"error": 0.0}))

        def numbers(kl: float, bound: float) -> str:
            text = f"In nats per response: {kl:.4g}, bound {bound:.4g}"
            return text if length is None else f"{text}; per token: {kl / length:.4g}, bound {bound / length:.4g}"

        is_first, self.memory["started"] = not self.memory.get("started", False), True
        if is_first and self.step <= rollout_steps(self._args) and abs(kl) > self.tolerance:
            advice = (
                "The policy is not trained yet, so its KL should be 0: check that the reference is the model that it "
                "started from."
            )
            yield Finding(f"the first rollout's KL is not 0{unit}", kl, self.tolerance, advice, acts=False)
        elif (mean := kls.below(plus=-self.tolerance)) is not None:
            advice = "A KL is never negative: the log-probs are not those of the policy that sampled the completions."
            yield Finding(f"the KL is negative{unit}", mean, -self.tolerance, advice, acts=False)
        if (mean := kls.above(plus=self.limit)) is not None:
            advice = "Read completions; raise the KL coefficient, or stop and keep an earlier checkpoint."
            advice = f"{advice} {numbers(mean, self.limit)}."
            yield Finding(f"the KL is over its budget{unit}", mean, self.limit, advice)
        elif (mean := kls.above(plus=warn)) is not None:
            advice = "Read completions: far from the reference, a reward model is less reliable."
            yield Finding(f"the KL nears its budget{unit}", mean, warn, f"{advice} {numbers(mean, warn)}.", acts=False)
