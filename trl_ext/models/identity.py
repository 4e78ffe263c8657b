"""Identify weights, configurations and tokenizers by hashes, for resuming runs and for sharing a base."""

import json
import os
from pathlib import Path
from typing import Any

import torch
import xxhash
from huggingface_hub import try_to_load_from_cache
from torch import Tensor
from torch.distributed.tensor import DTensor

from .weights import base_model_of, whole

_PIECE, _PIECES = 2**20, 64


def weights_identity(model: Any, path: str | None = None, revision: str | None = None) -> str:
    """
    Identify the weights of a model.

    Args:
        model: a transformers model, plain or with adapters, which are left out.
        path: folder or hub name that the model was loaded from; None if the model was changed since.
        revision: revision of the model on the hub.

    Returns:
        `name@commit` for a model of the hub; for a folder or an object `xxh3:` and a hash of its weights.
    """
    return hub_identity(path, revision) or f"xxh3:{weights_hash(base_model_of(model))[:12]}"


def hub_identity(path: str | None, revision: str | None = None) -> str | None:
    """
    Return `name@commit` of a model that was loaded from the hub.

    Return None for a folder, without a path, and if the model is not in the local cache.
    """
    if path is None or os.path.isdir(path):
        return None
    for name in ("config.json", "adapter_config.json"):
        config = try_to_load_from_cache(path, name, revision=revision)
        if isinstance(config, str):
            return f"{path}@{Path(config).parent.name}"
    return None


def path_identity(path: str, revision: str | None = None) -> str:
    """
    Identify the model at a path without loading it.

    Returns:
        `name@commit` for a model of the hub; for a folder `xxh3:` and a hash of its files of weights and
        configuration.
    """
    if identity := hub_identity(path, revision):
        return identity
    patterns = ("*.safetensors", "pytorch_model*.bin", "config.json", "adapter_config.json")
    files = {file.name: file_hash(file) for pattern in patterns for file in Path(path).glob(pattern)}
    return _hash_of_text(json.dumps(files, sort_keys=True))


def weights_hash(module: Any) -> str:
    """
    Return a hash of a module's weights; adapters are left out.

    Quantised weights are hashed as they are stored, all others in float32, so that a model loaded in a wider dtype has
    the same hash. The hash tells weights apart, but does not guard against an attacker. Under ZeRO-3 every process
    must call this function.
    """
    return hash_of(
        {
            name.replace(".base_layer", "").replace(".original_module", ""): tensor
            for name, tensor in module.state_dict(keep_vars=True).items()
            if "lora_" not in name and ".modules_to_save." not in name
        }
    )


def tokenizer_identity(tokenizer: Any) -> str:
    """Return a hash of a tokenizer, or a processor's: of its vocabulary, rules, special tokens and chat template."""
    template, tokenizer = getattr(tokenizer, "chat_template", None), getattr(tokenizer, "tokenizer", tokenizer)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules: Any = [tokenizer.get_vocab()]
    if backend is not None:
        rules = {**json.loads(backend.to_str()), "truncation": None, "padding": None}  # left over from its last call
    special = [tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token]
    return _hash_of_text(json.dumps([rules, special, template], sort_keys=True, default=str))


def _hash_of_text(text: str) -> str:
    return f"xxh3:{xxhash.xxh3_128(text.encode()).hexdigest()[:12]}"


def hash_of(tensors: dict[str, Any]) -> str:
    """
    Return a hash of the names, shapes and values of tensors; other values in the dictionary are left out.

    Floating-point values are hashed as float32, which holds half precision exactly. Of a meta tensor (FSDP may load
    the weights on the first process only) no values are hashed. If tensors are sharded, all processes must call this.
    """
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(tensors.items()):
        if not isinstance(tensor, Tensor):
            continue
        with whole(tensor):
            digest.update(f"{name} {tensor.shape}".encode())
            if tensor.is_meta:
                continue
            values = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            for piece in values.detach().reshape(-1).split(2**20):  # a float32 copy of all would take twice the memory
                piece = piece.float() if piece.is_floating_point() else piece
                digest.update(piece.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def file_hash(path: str | os.PathLike[str]) -> str:
    """
    Return a hash of a file's size and content, in about a second.

    Of a file above 64 MiB only 64 pieces of 1 MiB are read, evenly spread from its start to its end. The hash guards
    against damage, not against an attacker.
    """
    size = os.path.getsize(path)
    count = min(_PIECES, -(-size // _PIECE))
    digest = xxhash.xxh3_128(str(size).encode())
    with open(path, "rb") as file:
        for i in range(count):
            file.seek(i * (size - _PIECE) // (count - 1) if i else 0)  # the last piece ends with the file
            digest.update(file.read(_PIECE))
    return digest.hexdigest()
