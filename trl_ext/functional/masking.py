"""Compute sums, means and indices over the real tokens of padded rows. In each mask 1 = real token, EOS included."""

import torch
from torch import Tensor

from .shapes import check_shapes


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum the values of the real tokens: sum_{b,t} m_bt x_bt.

    Values under the mask, NaN and inf included, change neither the sum nor a gradient.

    Args:
        values: (B, T) or any shape, any unit; a bool counts as 0 or 1.
        mask: the shape of values, 1 = real token.

    Returns:
        Scalar; float32 if values are of half precision, integers or bools, else their dtype.

    Raises:
        ValueError: shapes differ.
    """
    check_shapes(values=values, mask=mask)
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    return torch.where(mask.bool(), values, 0.0).sum()


def masked_mean(values: Tensor, mask: Tensor, count: Tensor | float | None = None) -> Tensor:
    """Average over the real tokens: sum_{b,t} m_bt x_bt / max(count, 1), 0 without a real token.

    Args:
        values: (B, T) or any shape, any unit; a bool counts as 0 or 1.
        mask: the shape of values, 1 = real token.
        count: scalar, the number of tokens to divide by; None divides by the number of real tokens in `mask`. With the
            number over all micro-batches and ranks, the results of the micro-batches *add up* to the mean over all.

    Returns:
        Scalar, dtype as in `masked_sum`.

    Raises:
        ValueError: shapes differ, or count is not a scalar.
    """
    total = masked_sum(values, mask)
    count = torch.as_tensor(mask.bool().sum() if count is None else count, dtype=total.dtype, device=total.device)
    if count.ndim != 0:
        raise ValueError(f"count must be a scalar, got shape {tuple(count.shape)}; sum it over rows and ranks first.")
    return total / count.clamp(min=1)


def position_ids(attention_mask: Tensor) -> Tensor:
    """Number the real tokens of each row from 0: p_t = max(cumsum(m)_t - 1, 0).

    On real tokens this equals cumsum(m) - m, as in TRL 1.12. To the right of n real tokens TRL's formula gives n,
    which a learned position table of n rows does not have; this function gives n - 1 there.

    Args:
        attention_mask: (B, L), 1 = real token, padded on either side.

    Returns:
        (B, L) int64, positions from 0.

    Raises:
        ValueError: attention_mask is not 2-dimensional.
    """
    check_shapes(ndim=2, attention_mask=attention_mask)
    return (attention_mask.bool().cumsum(dim=-1) - 1).clamp(min=0)


def last_token_index(mask: Tensor) -> Tensor:
    """Find the last real token of each row: max{t : m_t = 1}, or -1 in an empty row.

    Args:
        mask: (B, T), 1 = real token; holes and padding on either side are fine.

    Returns:
        (B,) int64, positions from 0 at the start of the row.

    Raises:
        ValueError: mask is not 2-dimensional.
    """
    check_shapes(ndim=2, mask=mask)
    positions = torch.where(mask.bool(), torch.arange(mask.shape[1], device=mask.device), -1)
    # A column of -1 goes in front, since amax refuses T = 0
    return torch.nn.functional.pad(positions, (1, 0), value=-1).amax(dim=-1)
