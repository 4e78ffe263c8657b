"""Which weights these are: one answer for resuming, and for adapters that want the base they were trained on."""

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from torch import Tensor
from torch.distributed.tensor import DTensor

from .weights import base_model_of, whole


def weights_identity(model: Any, path: str | None = None, revision: str | None = None) -> str:
    """
    Say which weights a model has.

    Args:
        model: a transformers model, plain or with adapters; only its base counts.
        path: what it was loaded from, if it was loaded and not changed since.
        revision: of that, on the hub.

    Returns:
        `name@commit` for a model of the hub, `sha256:…` of its weights for a folder or an object.
    """
    return hub_identity(path, revision) or f"sha256:{weights_hash(base_model_of(model))}"


def hub_identity(path: str | None, revision: str | None = None) -> str | None:
    """`name@commit` of what was loaded by name from the hub; None for a folder, or for nothing."""
    if path is None or os.path.isdir(path):
        return None
    config = try_to_load_from_cache(path, "config.json", revision=revision)
    return f"{path}@{Path(config).parent.name}" if isinstance(config, str) else None


def weights_hash(module: Any) -> str:
    """
    SHA-256 of a module's weights without adapters, as they are after quantisation, and in float32, so that a model
    that is loaded in a wider dtype has the same. Under ZeRO-3 every process must call it.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict(keep_vars=True).items()):
        if "lora_" in name or ".modules_to_save." in name or not isinstance(tensor, Tensor):
            continue
        with whole(tensor):
            digest.update(f"{name.replace('.base_layer', '').replace('.original_module', '')} {tensor.shape}".encode())
            digest.update(values_of(tensor))
    return digest.hexdigest()


def values_of(tensor: Tensor) -> Any:
    """
    The bytes of a tensor, of floating-point ones in float32, in which every half-precision number is exact; none of
    one that is not here: FSDP may load the weights on the first process only. Of a sharded one, all must ask.
    """
    if tensor.is_meta:
        return b""
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    values = tensor.detach().float() if tensor.is_floating_point() else tensor.detach()
    return values.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
