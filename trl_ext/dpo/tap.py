"""Read the policy's log-probs in the middle of TRL's loss."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class TappedModel:
    """
    Stand in for the model in TRL's loss: call `on_log_probs` after the policy's forward pass, before TRL reads β.

    Args:
        model: the policy; its outputs are passed on unchanged.
        on_log_probs: called with the policy's log-probs, (2B, T), nats. What it returns is kept as `result`.
    """

    def __init__(self, model: nn.Module, on_log_probs: Callable[[Tensor], Any]):
        self.model, self.on_log_probs = model, on_log_probs
        self.result: Any = None

    def __call__(self, **kwargs: Any) -> Any:
        outputs = self.model(**kwargs)
        if kwargs.get("fused_lm_head"):  # else TRL asks for the logits alone, for `compute_metrics`
            self.result = self.on_log_probs(outputs.log_probs)
        return outputs
