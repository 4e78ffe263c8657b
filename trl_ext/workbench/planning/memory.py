"""
Count bytes: of tensors by formulas, and of forward and backward passes by running them without data.

`FakeTensorMode` runs a model's own code, autocast and checkpointing on tensors that have shapes but no memory. A model
of 8 billion parameters is measured in seconds on a laptop.
"""

import contextlib
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

GIB = 2**30


def quantized_bytes(weights: int, bits: int, nested: bool = False) -> int:
    """
    Return the bytes of `weights` weights that bitsandbytes stores in 4 or 8 `bits`.

    In 4 bits, each block of 64 weights has a float32 scale. With `nested` quantisation (arXiv:2305.14314) each block
    has an 8-bit scale instead, and 256 of these scales share one in float32. In 8 bits each row has a float32 scale,
    which is not counted.
    """
    if bits == 8:
        return weights
    blocks = math.ceil(weights / 64)
    scales = blocks + 4 * math.ceil(blocks / 256) if nested else 4 * blocks
    return math.ceil(weights / 2) + scales


def optimizer_bytes(weights: int, weight_bytes: int, optim: str) -> int:
    """
    Return the bytes of an optimizer's state for `weights` trained weights of `weight_bytes` each.

    Adam and its kin keep two moments in the weights' dtype, or in 8 bits with a float32 scale per 256 numbers. Lion
    and RMSprop keep one moment, AdEMAMix keeps three, and SGD keeps none. Adafactor keeps a row and a column for each
    matrix of weights, which are so small that they count as 0 bytes. Any other optimizer counts as Adam.
    """
    few = {"sgd": 0, "adafactor": 0, "lion": 1, "rmsprop": 1, "ademamix": 3}
    moments = next((number for name, number in few.items() if name in optim), 2)
    size = weights + 4 * math.ceil(weights / 256) if "8bit" in optim else weights * weight_bytes
    return moments * size


def kv_cache_bytes(config: Any, rows: int, tokens: int, number_bytes: int) -> int:
    """
    Return the bytes of the KV cache of `rows` sequences of `tokens` tokens.

    `config` is the model's text configuration. Each number in a key or a value takes `number_bytes` bytes.
    """
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_dim * rows * tokens * number_bytes


def share(size: int, processes: int) -> int:
    """Return the size of each process's part of a tensor that is sharded over `processes`, rounded up."""
    return math.ceil(size / processes)


class LiveBytes(TorchDispatchMode):
    """
    Count the bytes of all storages that operations make within the `with` block.

    `live` is the number of bytes now, and `peak` the highest number so far. The weights of `modules` do not count.
    """

    def __init__(self, *modules: nn.Module):
        super().__init__()
        self.live = self.peak = 0
        self._known: weakref.WeakSet = weakref.WeakSet()
        for module in modules:
            for tensor in (*module.parameters(), *module.buffers()):
                self._known.add(tensor.untyped_storage())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for tensor in tree_iter(output):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()) not in self._known:
                self._known.add(storage)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._forget, storage.nbytes())
        return output

    def _forget(self, size: int) -> None:
        self.live -= size


def fake(build: Callable[[], Any]) -> tuple[Any, FakeTensorMode]:
    """
    Return what `build` returns, such as a tuple of modules, but on fake tensors without memory; and the
    `FakeTensorMode` to run the modules in.
    """
    with torch.device("meta"):  # PEFT cannot add an adapter within the mode
        made = build()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    twins = {}

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
    Return the peak bytes of one forward and backward pass, without weights and optimizer state.

    Args:
        mode, model: the mode and the model that [`fake`] returned.
        loss: a function that computes the loss of `model`.
        autocast: dtype of mixed precision; None for no mixed precision.
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
    """
    Return the peak bytes of a forward pass without gradients; the weights do not count.

    Args:
        mode, model: the mode and the model that [`fake`] returned.
        forward: a function that runs the pass.
        autocast: dtype of mixed precision; None for no mixed precision.
    """
    with mode, LiveBytes(model) as counted, _autocast(autocast):
        forward()
    return counted.peak


def _autocast(dtype: torch.dtype | None) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)
