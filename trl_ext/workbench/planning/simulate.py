"""
Measure the memory of forward and backward passes by running them on tensors without data.

`FakeTensorMode` runs a model's own code, autocast and checkpointing on tensors that have shapes but no memory. A model
of 8 billion parameters is measured in seconds on a laptop.
"""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """
    Count the bytes of all storages that operations make in this context.

    `live` is the number of bytes now, and `peak` the highest number so far. The weights of `modules` do not count.
    """

    def __init__(self, *modules: nn.Module):
        super().__init__()
        self.live = self.peak = 0
        self._known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        for module in modules:
            for tensor in (*module.parameters(), *module.buffers()):
                self._known[tensor.untyped_storage()] = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for tensor in tree_iter(output):
            if isinstance(tensor, Tensor):
                self._see(tensor.untyped_storage())
        return output

    def _see(self, storage: Any) -> None:
        if storage in self._known:
            return
        size = storage.nbytes()
        self._known[storage] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, size)

    def _forget(self, size: int) -> None:
        self.live -= size


def fake(build: Callable[[], Any]) -> tuple[Any, FakeTensorMode]:
    """Return what `build` makes, a module or several, with weights without memory, and the mode to run it in."""
    with torch.device("meta"):
        made = build()
    mode, twins = FakeTensorMode(allow_non_fake_inputs=True), {}

    def twin(tensor: Tensor) -> Tensor:  # one twin a tensor keeps tied weights tied
        if id(tensor) not in twins:
            with mode:
                new = torch.empty_like(tensor, device="cpu")
            is_parameter = isinstance(tensor, nn.Parameter)
            twins[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
        return twins[id(tensor)]

    for part in tree_iter(made):
        for module in part.modules() if isinstance(part, nn.Module) else ():
            for tensors in (vars(module)["_parameters"], vars(module)["_buffers"]):
                tensors.update({name: twin(tensor) for name, tensor in tensors.items() if tensor is not None})
    return made, mode


def tokens(rows: int, length: int) -> dict[str, Tensor]:
    """Return a batch without padding: `input_ids` and `attention_mask`, (rows, length)."""
    ids = torch.zeros(rows, length, dtype=torch.long)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def training_peak(
    mode: FakeTensorMode,
    model: nn.Module,
    loss: Callable[[], Tensor],
    autocast: torch.dtype | None = None,
    gradients: str = "fresh",
    others: tuple[nn.Module, ...] = (),
) -> int:
    """
    Return the peak bytes of one forward and backward pass, beside weights and optimizer state.

    Args:
        mode, model: the mode and the model that [`fake`] returned.
        loss: a function that computes the loss of `model`.
        autocast: dtype of mixed precision; None runs without it.
        gradients: `"fresh"` counts the gradients that this pass makes. `"kept"` counts the gradients of an earlier
            micro-batch, which exist from the start. `"sharded"` drops each gradient once it is complete; the caller
            counts the shards.
        others: further modules that `loss` uses; their weights do not count either.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hooks = []
    with mode, LiveBytes(model, *others) as counted:
        if gradients == "kept":
            for parameter in trained:
                parameter.grad = torch.empty_like(parameter)
        if gradients == "sharded":
            hooks = [p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)) for p in trained]
        with _autocast(autocast):
            value = loss()
        value.backward()
        del value
    for hook in hooks:
        hook.remove()
    model.zero_grad(set_to_none=True)
    return counted.peak


@torch.no_grad()
def forward_peak(
    mode: FakeTensorMode, model: nn.Module, forward: Callable[[], Any], autocast: torch.dtype | None = None
) -> int:
    """Return the peak bytes, beside the weights, of a forward pass that no backward pass follows."""
    with mode, LiveBytes(model) as counted, _autocast(autocast):
        forward()
    return counted.peak


def _autocast(dtype: torch.dtype | None) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)
