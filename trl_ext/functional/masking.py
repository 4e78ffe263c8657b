"""Compute sums, means and indices over the real tokens, or turns, of padded rows. In a mask 1 = real token or EOS."""

import torch
from torch import Tensor


def check_shapes(**tensors: Tensor) -> None:
    """Raise a `ValueError` if the named tensors have different shapes, which torch might broadcast silently."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len({*shapes.values()}) > 1:
        raise ValueError(f"shapes must be equal (they are not broadcast), got {shapes}")


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum the values of the real tokens: sum_{b,t} m_bt x_bt.

    Values under the mask, NaN and inf included, do not change the sum, and get a gradient of 0.

    Args:
        values: (B, T) or any shape, any unit; a bool counts as 0 or 1.
        mask: the shape of values, 1 = real token.

    Returns:
        Scalar; float32 if values are of half precision, integers or bools, else their dtype.
    """
    check_shapes(values=values, mask=mask)
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    return torch.where(mask.bool(), values, 0.0).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Average over the real tokens: sum_{b,t} m_bt x_bt / max(sum_{b,t} m_bt, 1), 0 without a real token.

    For the mean over several micro-batches and ranks, add up their [`masked_sum`]s and divide by their token count.

    Args:
        values: (B, T) or any shape, any unit; a bool counts as 0 or 1.
        mask: the shape of values, 1 = real token.

    Returns:
        Scalar, dtype as in `masked_sum`.
    """
    return masked_sum(values, mask) / mask.bool().sum().clamp(min=1)


def position_ids(attention_mask: Tensor) -> Tensor:
    """Number the real tokens of each row from 0: p_t = max(cumsum(m)_t - 1, 0).

    On real tokens this equals cumsum(m) - m, as in TRL 1.12. To the right of n real tokens TRL's formula gives n,
    which a learned position table of n rows does not have; this function gives n - 1 there.

    Args:
        attention_mask: (B, L), 1 = real token, padded on either side.

    Returns:
        (B, L) int64, positions from 0.
    """
    return (attention_mask.bool().cumsum(dim=-1) - 1).clamp(min=0)


def last_token_index(mask: Tensor) -> Tensor:
    """Find the last real token of each row: max{t : m_t = 1}, or -1 in an empty row.

    Args:
        mask: (B, T), 1 = real token. It may be 0 within a row, and at either end.

    Returns:
        (B,) int64, positions from 0 at the start of the row.
    """
    columns = torch.arange(mask.shape[1], device=mask.device)
    positions = torch.where(mask.bool(), columns, -1)
    # A column of -1 goes in front, since amax refuses T = 0
    return torch.nn.functional.pad(positions, (1, 0), value=-1).amax(dim=-1)


# ---- Turns: runs of tokens that the policy sampled, between what tools or environments wrote ----


def turn_numbers(mask: Tensor) -> Tensor:
    """Number the turns of each row from 0. A turn is an unbroken run of tokens that the policy sampled.

    Args:
        mask: (B, T), 1 = token that the policy sampled.

    Returns:
        (B, T) int64, the number of each token's turn. Tokens after a turn have its number until the next turn starts;
        tokens before the first turn have 0.
    """
    return (turn_starts(mask).cumsum(dim=1) - 1).clamp(min=0)


def turn_starts(mask: Tensor) -> Tensor:
    """Return (B, T) bools, True at the first token of each turn; `mask` is as in `turn_numbers`."""
    mask = mask.bool()
    return mask & ~torch.nn.functional.pad(mask[:, :-1], (1, 0))


def turn_sums(values: Tensor, mask: Tensor) -> Tensor:
    """Sum the values over each turn, and give every token its turn's sum: s_t = sum of x_u over the turn of token t.

    A turn is an unbroken run of tokens that the policy sampled.

    Args:
        values: (B, T), x, any unit. Of log-probs, the sum is the log-prob of the whole turn as one action.
        mask: (B, T), 1 = token that the policy sampled, 0 = padding, or a token that a tool or environment wrote.

    Returns:
        (B, T), the sum of each token's turn; 0 where the mask is 0.
    """
    check_shapes(values=values, mask=mask)
    turns = turn_numbers(mask)
    values = torch.where(mask.bool(), values, 0.0)
    sums = torch.zeros_like(values).scatter_add(1, turns, values)
    return torch.where(mask.bool(), sums.gather(1, turns), 0.0)
