"""Compute attention over packed rows by torch's kernel for rows of different lengths, which reads no mask."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "trl_ext_varlen"  # an attention implementation: SDPA, but for packed rows


def starts_of(lengths: Tensor, columns: int, device: Any) -> Tensor:
    """
    Say in place of a mask where rows of the given (B,) lengths begin, one after the other, in `columns` tokens.

    Returns:
        (1, 1, R + 1, longest) int32, each number `longest` times without memory of its own. Transformers passes a 4-D
        mask on to the layers as it is. R is B, or B + 1 if there are pads: they are a row, too, else they would have
        no gradient of 0.
    """
    ends = lengths.cumsum(0)
    if int(ends[-1]) < columns:
        lengths, ends = (
            torch.cat([x, x.new_tensor([y])]) for x, y in ((lengths, columns - ends[-1]), (ends, columns))
        )
    starts = torch.cat([ends.new_zeros(1), ends]).int().to(device)
    return starts[None, None, :, None].expand(1, 1, -1, int(lengths.max()))


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attend as transformers' SDPA does, but within packed rows if `attention_mask` is what [`starts_of`] returns."""
    if attention_mask is None or attention_mask.dtype != torch.int32:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    starts, longest = attention_mask[0, 0, :, 0].contiguous(), attention_mask.size(-1)
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype  # as SDPA is computed
    q, k, v = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))  # (tokens, heads, size of a head)
    window = (kwargs.get("sliding_window") or 0) - 1  # -1: none
    scale = kwargs.get("scaling")
    output: Any = varlen.varlen_attn(
        q, k, v, starts, starts, longest, longest, scale=scale, window_size=(window, 0), enable_gqa=True
    )
    return output[None], None


def use_varlen(model: Any, dtype: torch.dtype | None = None) -> None:
    """
    Let the models in `model` attend by torch's kernel where rows are packed.

    The kernel takes 16-bit numbers on a CUDA device, and knows neither dropout nor soft-capping.

    Args:
        model: a module that holds transformers' models.
        dtype: dtype of autocast, if there is one.
    """
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    for each in [each for each in model.modules() if isinstance(each, PreTrainedModel)]:
        config = each.config.get_text_config()
        if (
            each.device.type == "cuda"
            and (dtype or each.dtype) in (torch.bfloat16, torch.float16)
            and config._attn_implementation == "sdpa"
            and not getattr(config, "attention_dropout", 0)
            and (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads) % 8 == 0
            and not getattr(config, "attn_logit_softcapping", None)
        ):
            each.set_attn_implementation(NAME)
