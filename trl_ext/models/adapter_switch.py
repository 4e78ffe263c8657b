"""Switch between policy, critic, reference and reward models that are adapters on one base."""

import functools
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..upstream.names import AuxiliaryTrainingWrapper, BaseTunerLayer
from .weights import base_model_of

POLICY, CRITIC, REFERENCE = "default", "critic", "ref"  # PEFT names the first adapter, we the second, TRL the third


class AdapterSwitch:
    """
    Choose the active adapters of a PEFT model, in all of its layers.

    PEFT's own `set_adapter` and `disable_adapter` also freeze the adapters that they switch off. TRL switches adapters
    off for its reference pass, so the critic would not train afterwards. This class freezes nothing.

    Gradient checkpointing recomputes layers in the backward pass under the adapters that are active by then. If other
    adapters were active in the forward, gradients are wrong, without an error. With this class, a layer is recomputed
    under the adapters that were active in its forward.
    """

    def __init__(self, model: Any):
        self.layers: list[Any] = [
            module for module in model.modules() if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))
        ]
        self._pin_checkpointing(base_model_of(model))

    @property
    def active(self) -> list[str]:
        """Return the names of the active adapters."""
        return self.layers[0].active_adapters

    def set(self, *names: str) -> None:
        """Make the adapters `names` active, and no others; without names, the base runs alone."""
        for layer in self.layers:
            layer._active_adapter = list(names)

    @contextmanager
    def use(self, *names: str):
        """Make the adapters `names` active within the block, and no others; then restore what was active before."""
        previous = self.active
        self.set(*names)
        try:
            yield
        finally:
            self.set(*previous)

    def _pin_checkpointing(self, base: Any) -> None:
        set_checkpointing = base._set_gradient_checkpointing

        def set_pinned(enable: bool = True, gradient_checkpointing_func: Callable = checkpoint, **kwargs: Any) -> None:
            set_checkpointing(
                enable=enable, gradient_checkpointing_func=self._pinned(gradient_checkpointing_func), **kwargs
            )

        base._set_gradient_checkpointing = set_pinned
        for module in base.modules():  # in case checkpointing is on already
            if hasattr(module, "_gradient_checkpointing_func"):
                module._gradient_checkpointing_func = self._pinned(module._gradient_checkpointing_func)

    def _pinned(self, checkpoint_function: Callable) -> Callable:
        def pinned(function: Callable, *args: Any, **kwargs: Any) -> Any:
            names = self.active

            def run_under_them(*args: Any, **kwargs: Any) -> Any:
                with self.use(*names):
                    return function(*args, **kwargs)

            return checkpoint_function(run_under_them, *args, **kwargs)

        return pinned


def merge_exactly(policy: Any) -> None:
    """
    Make `policy.unmerge_adapter` restore the base's weights exactly as they were before `policy.merge_adapter`.

    TRL calls the two methods around each weight sync to vLLM. PEFT's own would add the adapter's product to the base's
    weights and subtract it again, and so move the reference by a rounding error at each sync.
    """
    merge = policy.merge_adapter
    kept: list[tuple[Any, nn.Parameter, Tensor]] = []

    @functools.wraps(merge)
    def merge_adapter(*args: Any, **kwargs: Any) -> None:
        for layer in policy.modules():
            if isinstance(layer, BaseTunerLayer):
                base = layer.get_base_layer()
                kept.extend((layer, parameter, parameter.data) for parameter in base.parameters(recurse=False))
        merge(*args, **{**kwargs, "safe_merge": True})  # which adds to a copy

    def unmerge_adapter() -> None:
        for layer, parameter, data in kept:
            parameter.data = data
            layer.merged_adapters.clear()
        kept.clear()

    policy.merge_adapter, policy.unmerge_adapter = merge_adapter, unmerge_adapter
