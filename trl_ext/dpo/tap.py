"""A look at the policy's log-probs in the middle of TRL's loss."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class TappedModel:
    """
    Stands in for the model inside TRL's loss: calls `on_log_probs` once the policy has answered, before TRL reads β.

    Args:
        model: what answers; its answer is passed on unchanged.
        on_log_probs: called with the answer's log-probs, (2B, T), nats; `result` is what it returns.
    """

    def __init__(self, model: nn.Module, on_log_probs: Callable[[Tensor], Any]):
        self.model, self.on_log_probs = model, on_log_probs
        self.result: Any = None

    def __call__(self, **kwargs: Any) -> Any:
        outputs = self.model(**kwargs)
        if kwargs.get("fused_lm_head"):  # else TRL only wants the logits, for `compute_metrics`
            self.result = self.on_log_probs(outputs.log_probs)
        return outputs
