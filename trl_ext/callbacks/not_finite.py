"""Alert on NaN and infinities."""

from dataclasses import dataclass

from ..runs.jsonl import finite
from .monitor import Action, Finding, MonitorCallback


@dataclass(eq=False, kw_only=True)
class NotFiniteCallback(MonitorCallback):
    """
    Alert when `grad_norm` or `loss` is not finite.

    Set `logging_nan_inf_filter=False`: by default a Trainer replaces a loss that is not finite by a finite one before
    it logs the loss. The gradient's norm is always logged as it is.

    >>> trainer.args.logging_nan_inf_filter = False
    >>> trainer.add_callback(NotFiniteCallback())
    """

    action: Action = "stop"
    runbook = "nan"
    saves = False  # the newest complete checkpoint is the good one

    def watch(self, logs):
        for key in ("grad_norm", "loss"):
            value = finite(logs.get(key))
            if value in ("nan", "inf", "-inf"):
                advice = (
                    f"Its value is {value}: lower the learning rate, use bf16 instead of fp16, and look for empty "
                    "rows."
                )
                yield Finding(f"`{key}` is not finite", None, None, advice)
