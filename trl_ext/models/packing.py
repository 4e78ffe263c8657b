"""Pack rows of different lengths into long sequences for a forward pass, instead of padding each to the longest."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

VARLEN = "trl_ext_varlen"  # an attention implementation: SDPA, but for packed rows


@dataclass(frozen=True)
class Packed:
    """
    Hold B rows packed into K sequences of C tokens; a row is a prompt and its completion without padding.

    A completion has at most T tokens; all completions together have N. Positions start from 0 in each row:
    transformers uses this to keep packed rows apart (`create_causal_mask`). Pads come after all rows of a sequence, so
    no row attends to them. `mask` is only for the router loss of a mixture of experts, which counts real tokens.
    """

    input_ids: Tensor  # (K, C)
    position_ids: Tensor  # (K, C), 0 in pads
    mask: Tensor  # (K, C), 1 = real token
    predicts: Tensor  # (N,), indices in (K · C) of the tokens after which the completion tokens are chosen
    targets: Tensor  # (N,), the completion tokens
    scatter_to: Tensor  # (N,), indices of the completion tokens in (B · T)
    shape: tuple[int, int]  # B, T
    starts: Tensor | None = None  # where rows begin, for [`use_varlen`]; see [`starts_of`]

    @property
    def inputs(self) -> dict[str, Any]:
        """
        Return the arguments of a model's forward, by name: `input_ids`, `position_ids` and `use_cache=False`. With
        `starts`, which says where rows begin (see [`starts_of`]), there is also `attention_mask`: it is `starts`.

        Nothing else is passed: with a cache or an ordinary mask, transformers would not tell the rows apart by their
        positions.
        """
        mask = {} if self.starts is None else {"attention_mask": self.starts}
        return {"input_ids": self.input_ids, "position_ids": self.position_ids, "use_cache": False, **mask}

    def unpack(self, values: Tensor) -> Tensor:
        """Arrange the (N,) values of the completion tokens as (B, T), with 0 on padding."""
        rows, width = self.shape
        return values.new_zeros(rows * width).index_put((self.scatter_to,), values).view(rows, width)


def pack(
    ids: Tensor,
    lengths: list[tuple[int, int]],
    width: int,
    hidden_size: int | None = None,
    multiple: int | None = None,
    one_sequence: bool = False,
    with_starts: bool = False,
) -> Packed:
    """
    Pack rows of prompts and completions, without their padding, into K sequences of C tokens for one forward pass.

    K and C are chosen, by the cost in [`distribute`], so that the pass is as cheap as possible.

    Args:
        ids: (B, P + T), prompts padded on the left, completions on the right.
        lengths: for each row, how many real tokens its prompt (at least one) and its completion have.
        width: T, how many of the columns of `ids` are for completions.
        hidden_size: the model's hidden size, from which costs are computed. None puts each row into a sequence of its
            own, whatever `one_sequence` and `with_starts` are, for a model that lets packed rows affect each other
            (see [`keeps_rows_apart`]).
        multiple: C is rounded up to a multiple of this number; None rounds nothing.
        one_sequence: whether all rows must go into one sequence, as FlashAttention's kernels require.
        with_starts: whether to pass the model the places where rows begin, for [`use_varlen`]; all rows then go into
            one sequence, too.

    Returns:
        The packed rows. Pass `inputs` to the model, and take its outputs at `predicts`, one for each of the N
        completion tokens; `unpack` arranges such (N,) values as (B, T).
    """
    prompts, completions = torch.tensor(lengths, dtype=torch.long).view(-1, 2).unbind(1)
    sizes = prompts + completions
    if hidden_size is None:
        sequences = [[row] for row in range(len(lengths))]
    else:
        sequences = distribute(sizes.tolist(), hidden_size, 1 if one_sequence or with_starts else len(lengths))
    columns = max(sum(int(sizes[row]) for row in rows) for rows in sequences)
    columns = -(-columns // (multiple or 1)) * (multiple or 1)
    starts = torch.zeros(len(lengths), dtype=torch.long)
    for k, rows in enumerate(sequences):
        starts[rows] = k * columns + sizes[rows].cumsum(0) - sizes[rows]

    row = torch.arange(len(lengths)).repeat_interleave(sizes)
    position = torch.arange(len(row)) - (sizes.cumsum(0) - sizes)[row]
    place = starts[row] + position
    source, positions, mask = torch.zeros(3, len(sequences) * columns, dtype=torch.long)
    source[place] = row * ids.size(1) + ids.size(1) - width - prompts[row] + position
    positions[place] = position  # and 0 after the last row, where each pad is a row of its own
    mask[place] = 1
    predicts = (position >= prompts[row] - 1) & (position < sizes[row] - 1)
    chosen = source[place[predicts]] + 1
    scatter_to = row[predicts] * width + (position - prompts[row] + 1)[predicts]

    def on_device(indices: Tensor) -> Tensor:
        return indices.to(ids.device, non_blocking=True)

    return Packed(
        input_ids=ids.flatten()[on_device(source)].view(-1, columns),
        position_ids=on_device(positions).view(-1, columns),
        mask=on_device(mask).view(-1, columns),
        predicts=on_device(place[predicts]),
        targets=ids.flatten()[on_device(chosen)],
        scatter_to=on_device(scatter_to),
        shape=(len(lengths), width),
        starts=starts_of(sizes[sequences[0]], columns, ids.device)
        if with_starts and hidden_size is not None
        else None,
    )


def distribute(sizes: list[int], hidden_size: int, max_sequences: int) -> list[list[int]]:
    """
    Distribute rows over K sequences, the longest row first, each to the sequence that is shortest so far; choose the K
    whose forward pass costs least.

    The cost of K sequences of C tokens is about proportional to K · C · (6 · hidden_size + C): for each token a layer
    uses some 12 · hidden_size² weights, and attention reads 2 · hidden_size · C numbers, masked or not. K is first
    `max_sequences`, then half of it (rounded up), and so on down to 1.

    Args:
        sizes: number of tokens of each of the B rows.
        hidden_size: hidden size of the model.
        max_sequences: the largest K that is tried.

    Returns:
        For each of the K sequences, the list of its rows' indices.
    """
    order = sorted(range(len(sizes)), key=lambda row: -sizes[row])
    best = []
    least = float("inf")
    count = max_sequences
    while True:
        sequences: list[list[int]] = [[] for _ in range(count)]
        tokens = [0] * count
        for row in order:
            shortest = tokens.index(min(tokens))
            sequences[shortest].append(row)
            tokens[shortest] += sizes[row]
        cost = count * max(tokens) * (6 * hidden_size + max(tokens))
        if cost < least:
            best = sequences
            least = cost
        if count == 1:
            return best
        count = -(-count // 2)


@torch.no_grad()
def keeps_rows_apart(forward: Callable[[Packed], Iterable[Tensor]], vocabulary: int, device: Any) -> bool:
    """
    Return whether a model keeps packed rows apart: its outputs for a row do not depend on the row packed before it.

    State-space layers, linear-attention layers and some models' own code do not keep rows apart: they carry state from
    one row into the next.

    Args:
        forward: runs the model on packed rows; returns (N,) tensors, its outputs for the N completion tokens.
        vocabulary: number of token ids.
    """
    row = (torch.arange(8) + 8) % vocabulary
    outputs = []
    for before in (torch.arange(8) % vocabulary, torch.arange(8).flip(0) % vocabulary):
        ids = torch.stack([before, row]).to(device)
        packed = pack(ids, [(4, 4)] * 2, 4, hidden_size=1, one_sequence=True)
        outputs.append([packed.unpack(values)[1] for values in forward(packed)])
    return all(torch.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in zip(*outputs, strict=True))


# ---- Attention over packed rows, by torch's kernel for rows of different lengths, which reads no mask ----


def starts_of(lengths: Tensor, columns: int, device: Any) -> Tensor:
    """
    Return where packed rows start, in the form of a 4-D mask, which transformers passes on to the layers unchanged.

    Args:
        lengths: (B,), the rows' lengths.
        columns: length of the sequence that they are packed into.

    Returns:
        (1, 1, R + 1, L) int32: the starts of R rows and the end of the last. L is the longest row's length; along it
        each number repeats, without taking memory. R is B, or B + 1 if there are pads, which count as a row.
    """
    ends = lengths.cumsum(0)
    if int(ends[-1]) < columns:  # pads need a row of their own, to get a gradient of 0
        lengths = torch.cat([lengths, lengths.new_tensor([columns - ends[-1]])])
        ends = torch.cat([ends, ends.new_tensor([columns])])
    starts = torch.cat([ends.new_zeros(1), ends]).int().to(device)
    return starts[None, None, :, None].expand(1, 1, -1, int(lengths.max()))


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attend as transformers' SDPA does, but only within packed rows if the mask comes from [`starts_of`]."""
    # Only `starts_of` makes a mask of int32
    if attention_mask is None or attention_mask.dtype != torch.int32:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    starts = attention_mask[0, 0, :, 0].contiguous()
    longest = attention_mask.size(-1)
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
    Make the models in `model` use torch's variable-length attention kernel where rows are packed.

    A model stays as it is if its attention is not SDPA, or if the kernel cannot run it: the kernel takes 16-bit
    numbers on a CUDA device and heads whose size is a multiple of 8, and supports neither dropout nor soft-capping.

    Args:
        model: a module that holds transformers' models.
        dtype: dtype of autocast, if there is one.
    """
    AttentionInterface.register(VARLEN, _attention)
    AttentionMaskInterface.register(VARLEN, sdpa_mask)
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
            each.set_attn_implementation(VARLEN)
