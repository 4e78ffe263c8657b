"""What tensors of known sizes take, in bytes: closed forms."""

import math

GIB = 2**30


def quantized_bytes(weights: int, bits: int, nested: bool = False) -> int:
    """
    Bytes of weights that bitsandbytes keeps in 4 or 8 bits.

    4 bits: blocks of 64 weights have a float32 scale each, or with `nested` quantisation (2305.14314) an 8-bit scale
    and one float32 for 256 of those. 8 bits: a float32 scale per row, which is left out.
    """
    if bits == 8:
        return weights
    blocks = math.ceil(weights / 64)
    return math.ceil(weights / 2) + (blocks + 4 * math.ceil(blocks / 256) if nested else 4 * blocks)


def optimizer_bytes(weights: int, weight_bytes: int, optim: str) -> int:
    """
    Bytes of an optimizer's state for `weights` trained numbers of `weight_bytes` each.

    Adam and its kin keep two moments in the weights' dtype, or in 8 bits with a float32 scale per 256 numbers; Lion
    and RMSprop keep one, AdEMAMix three. Adafactor keeps a row and a column, nothing beside a matrix; SGD nothing.

    Raises:
        ValueError: an optimizer whose state is not known here.
    """
    moments = 1 if "lion" in optim or "rmsprop" in optim else 2
    if optim.startswith(("sgd", "adafactor")):
        return 0
    if not any(name in optim for name in ("adam", "lion", "rmsprop", "ademamix")):
        raise ValueError(f"the memory of `optim: {optim}` is not known: use an AdamW, or count it yourself")
    moments += "ademamix" in optim
    return moments * (weights + 4 * math.ceil(weights / 256) if "8bit" in optim else weights * weight_bytes)


def kv_cache_bytes(layers: int, kv_heads: int, head_dim: int, rows: int, tokens: int, number_bytes: int) -> int:
    """Bytes of the keys and values of `rows` sequences of `tokens` tokens."""
    return 2 * layers * kv_heads * head_dim * rows * tokens * number_bytes


def share(size: int, processes: int) -> int:
    """What one of `processes` keeps of something that is sharded over them."""
    return math.ceil(size / processes)
