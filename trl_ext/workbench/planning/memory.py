"""Count bytes of tensors of known sizes, in closed form."""

import math
from typing import Any

GIB = 2**30


def quantized_bytes(weights: int, bits: int, nested: bool = False) -> int:
    """
    Return the bytes of weights that bitsandbytes keeps in 4 or 8 bits.

    In 4 bits, each block of 64 weights has a float32 scale. With `nested` quantisation (arXiv:2305.14314) each block
    has an 8-bit scale instead, and 256 of these scales share one in float32. In 8 bits each row has a float32 scale,
    which is not counted.
    """
    if bits == 8:
        return weights
    blocks = math.ceil(weights / 64)
    return math.ceil(weights / 2) + (blocks + 4 * math.ceil(blocks / 256) if nested else 4 * blocks)


def optimizer_bytes(weights: int, weight_bytes: int, optim: str) -> int:
    """
    Return the bytes of an optimizer's state for `weights` trained numbers of `weight_bytes` each.

    Adam and its kin keep two moments in the weights' dtype, or in 8 bits with a float32 scale per 256 numbers. Lion
    and RMSprop keep one moment, AdEMAMix keeps three, and SGD keeps none. Adafactor keeps a row and a column for each
    matrix of weights, which are so small that they count as 0 bytes.

    Raises:
        ValueError: the state of this optimizer is not known here.
    """
    moments = 1 if "lion" in optim or "rmsprop" in optim else 2
    if optim.startswith(("sgd", "adafactor")):
        return 0
    if not any(name in optim for name in ("adam", "lion", "rmsprop", "ademamix")):
        raise ValueError(f"the memory that `optim: {optim}` takes is not known: use AdamW, or count it yourself")
    moments += "ademamix" in optim
    return moments * (weights + 4 * math.ceil(weights / 256) if "8bit" in optim else weights * weight_bytes)


def kv_cache_bytes(layers: int, kv_heads: int, head_dim: int, rows: int, tokens: int, number_bytes: int) -> int:
    """Return the bytes of the cached keys and values of `rows` sequences of `tokens` tokens each."""
    return 2 * layers * kv_heads * head_dim * rows * tokens * number_bytes


def kv_cache_of(config: Any, rows: int, tokens: int, number_bytes: int) -> int:
    """Return the bytes of a model's cached keys and values; `config` is the model's text configuration."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return kv_cache_bytes(config.num_hidden_layers, heads, head_dim, rows, tokens, number_bytes)


def share(size: int, processes: int) -> int:
    """Return how much of a tensor of `size` each process keeps if it is sharded over `processes`, rounded up."""
    return math.ceil(size / processes)
