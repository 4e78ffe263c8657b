"""Unwrap a model, check its vocabulary, and count, gather, copy or identify its weights."""

import copy
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import xxhash
from huggingface_hub import model_info, try_to_load_from_cache
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer
from transformers.utils import cached_file

from ..upstream.names import add_hooks, disable_dropout_in_model, remove_hooks
from ..upstream.statements import temporarily


def base_model_of(model: Any) -> Any:
    """Return the transformers model under a PEFT wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def unwrapped(model: Any) -> Any:
    """Return the module that DDP or DeepSpeed wraps, or the model itself."""
    return getattr(model, "module", model)


def context_of(model: Any, otherwise: Any = math.inf) -> Any:
    """Return the length of the context, in tokens, of a model or configuration; `otherwise` if it has no limit."""
    config = getattr(base_model_of(unwrapped(model)), "config", model)
    return getattr(config.get_text_config(), "max_position_embeddings", None) or otherwise


# ---- Vocabularies ----


def vocabulary_of(model: Any) -> int:
    """Return the number of token ids that a model has embeddings for."""
    return base_model_of(model).config.get_text_config().vocab_size


def tokens_beyond(vocabulary: int, tokenizer: Any) -> dict[str, int]:
    """
    Return {token: id} of the tokenizer's tokens with an id of at least `vocabulary`, sorted by id.

    Args:
        vocabulary: number of token ids that the model has embeddings for.
    """
    beyond = [(i, token) for token, i in tokenizer.get_vocab().items() if i >= vocabulary]
    return {token: i for i, token in sorted(beyond)}


def check_tokenizer(model: Any, tokenizer: Any) -> None:
    """Raise a `ValueError` if the tokenizer has no EOS token, or has token ids beyond the model's vocabulary."""
    if tokenizer.eos_token_id is None:
        raise ValueError("The tokenizer has no EOS token, so no completion would end. Set `tokenizer.eos_token`.")
    check_pad_token(model, tokenizer)
    if unknown := tokens_beyond(vocabulary_of(model), tokenizer):
        raise ValueError(
            f"The model has embeddings for {vocabulary_of(model)} tokens, but the tokenizer has higher ids: "
            f"{[*unknown.items()][:3]}. Pass the model's own tokenizer, or call `model.resize_token_embeddings`."
        )


def check_pad_token(model: Any, tokenizer: Any) -> None:
    """
    Raise a `ValueError` if the model has no embedding for the pad token, since the saved model could not be loaded.
    """
    if (pad := tokenizer.pad_token_id) is not None and pad >= vocabulary_of(model):
        raise ValueError(
            f"The pad token {tokenizer.pad_token!r} has the id {pad}, for which {type(model).__name__} has no "
            f"embedding. Set `pad_token` to one that it has, such as {tokenizer.eos_token!r}."
        )


def check_same_ids(what: str, path: str | None, tokenizer: Any) -> None:
    """
    Raise a `ValueError` if a model's saved tokenizer gives any token, except the pad token, another id than
    `tokenizer` does.

    Comparing the sizes of vocabularies is not enough: those of Qwen2.5's models differ, though they share a tokenizer.
    If no tokenizer was saved with the model, or the model is not on this machine, nothing is checked.

    Args:
        what: how the message names the model.
        path: folder or hub name of the model; None checks nothing.
        tokenizer: the policy's tokenizer.
    """
    if path is None:
        return
    try:
        cached_file(path, "tokenizer_config.json", local_files_only=True)  # else transformers might make one up
        theirs = AutoTokenizer.from_pretrained(path, local_files_only=True).get_vocab()
    except (OSError, ValueError, ImportError):
        return
    ours = tokenizer.get_vocab().items()
    moved = [(i, token) for token, i in ours if theirs.get(token, i) != i and i != tokenizer.pad_token_id]
    if moved:
        i, token = min(moved)  # the same on each process, where the order may differ
        raise ValueError(
            f"{what} reads the policy's token ids, but was saved with another tokenizer, in which {token!r} has the "
            f"id {theirs[token]}, not {i}. Use a model with the policy's tokenizer."
        )


# ---- Weights ----


def disable_dropout(model: nn.Module) -> None:
    """
    Switch dropout off in dropout modules, and in layers that store a dropout rate, such as Llama's
    `attention_dropout`.
    """
    disable_dropout_in_model(model)
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode within the `with` block, without dropout and activation checkpointing."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def keep_4bit_layout(model: nn.Module) -> None:
    """
    Keep bitsandbytes from packing 4-bit weights into a layout that passes no gradient on.

    On a CPU with AVX512-BF16, bitsandbytes packs a layer for good at its first forward in evaluation mode. A packed
    layer passes no gradient on, so after an evaluation nothing below it would learn. A packed layer also needs sizes
    that are multiples of 32.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            vars(module)["support_avx512bf16_for_cpu"] = False


def unpatched_copy(model: nn.Module, what: str, load_again: Callable[[], Any] | None = None) -> Any:
    """
    Copy a model without the `forward` that TRL or accelerate patched onto the instance.

    A model that ZeRO-3 has partitioned cannot be copied. Then call `load_again`, which loads the same weights; if it
    is None, raise a `ValueError`, which calls the copy `what`.
    """
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        if load_again is not None:
            return load_again()
        raise ValueError(
            f"{what} cannot be a copy of the {type(model).__name__}, which ZeRO-3 has partitioned. Pass that model as "
            "a path."
        )
    twin = copy.deepcopy(model)
    for module in (twin, base_model_of(twin)):
        vars(module).pop("forward", None)
    return twin


# ---- Shards ----


def whole(parameter: Tensor, modifier_rank: int | None = None) -> AbstractContextManager:
    """
    Gather a parameter within the `with` block, if ZeRO-3 has partitioned it.

    Changes that process `modifier_rank` makes to it are kept; with None, it must not be changed.
    """
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter], modifier_rank=modifier_rank)


@contextmanager
def gathered_by_zero3(engine: nn.Module, policy: nn.Module, args: Any) -> Iterator[None]:
    """
    Gather the policy's weights once, and keep them whole until the end of the `with` block. `engine` is DeepSpeed's
    model, which holds the policy; `args` is the trainer's configuration.

    TRL would gather the critic's weights, too, and would gather them all again for each batch.
    """
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(policy.parameters())):
        remove_hooks(engine)  # they would partition a layer's weights again after its forward pass
        try:
            with temporarily(args, ds3_gather_for_generation=False):
                yield
        finally:
            add_hooks(engine)


@contextmanager
def kept_by_fsdp2(policy: nn.Module) -> Iterator[None]:
    """
    Keep the weights that FSDP2 gathers in the policy's first forward pass until the end of the `with` block.

    Otherwise FSDP2 would gather each layer's weights again for each generated token.
    """
    layers = [module for module in policy.modules() if isinstance(module, FSDPModule)]
    groups = [group for layer in layers for group in layer._get_fsdp_state()._fsdp_param_groups]
    # `set_reshard_after_forward` overwrites these
    reshard = [group.post_forward_mesh_info for group in groups]
    for layer in layers:
        layer.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for group, info in zip(groups, reshard, strict=True):
            group.post_forward_mesh_info = info
        for layer in layers:
            layer.reshard()


# ---- Identities ----


def weights_identity(model: Any, path: str | None = None, revision: str | None = None) -> str:
    """
    Identify the weights of a model.

    Args:
        model: a transformers model, plain or with adapters, which are left out.
        path: folder or hub name that the model was loaded from; None if the model was changed since.

    Returns:
        `name@commit` for a model of the hub that is in the local cache; else `xxh3:` and a hash of its weights.
    """
    return hub_identity(path, revision) or f"xxh3:{weights_hash(base_model_of(model))[:12]}"


def hub_identity(path: str | None, revision: str | None = None) -> str | None:
    """
    Return `name@commit` of a model that was loaded from the hub at `revision` (None: the default branch).

    Return None if `path` is None or a folder, or if the model is not in the local cache.
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
    Identify a model by its folder, or by its hub name and `revision`, without loading it.

    Returns:
        `name@commit` for a model of the hub; for a folder `xxh3:` and a hash of its files of weights and
        configuration.
    """
    if not os.path.isdir(path):
        return hub_identity(path, revision) or f"{path}@{model_info(path, revision=revision).sha}"
    patterns = ("*.safetensors", "pytorch_model*.bin", "config.json", "adapter_config.json")
    files = {file.name: file_hash(file) for pattern in patterns for file in Path(path).glob(pattern)}
    return _hash_of_text(json.dumps(files, sort_keys=True))


def weights_hash(module: Any) -> str:
    """
    Return a hash of a module's weights; adapters are left out.

    Quantised weights are hashed as they are stored, all others in float32, so that a model loaded in a wider dtype has
    the same hash. The hash tells weights apart, but does not guard against an attacker. If weights are sharded, every
    process must call this function.
    """
    return hash_of(
        {  # `keep_vars`, since a detached tensor does not show that ZeRO-3 has partitioned it
            name.replace(".base_layer", "").replace(".original_module", ""): tensor
            for name, tensor in module.state_dict(keep_vars=True).items()
            if "lora_" not in name and ".modules_to_save." not in name
        }
    )


def tokenizer_identity(tokenizer: Any) -> str:
    """Return a hash of the vocabulary, rules, special tokens and chat template of a tokenizer or processor."""
    template = getattr(tokenizer, "chat_template", None)
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
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

    Floating-point values are hashed as float32, which holds half precision exactly. For a meta tensor (FSDP may load
    the weights on the first process only), only name and shape are hashed. If tensors are sharded, all processes must
    call this.
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
    """Return a hash of a file's content, which guards against damage, not against an attacker."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
