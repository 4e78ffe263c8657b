"""Find the turns of an episode: runs of tokens that the policy drew, separated by what tools or environments wrote."""

import torch
from torch import Tensor

from .shapes import check_shapes


def turn_numbers(mask: Tensor) -> Tensor:
    """Number the turns of each row from 0. A turn is an unbroken run of tokens that the policy drew.

    Args:
        mask: (B, T), 1 = token that the policy drew.

    Returns:
        (B, T) int64, the number of each token's turn. Tokens between two turns have the earlier one's number; tokens
        before the first turn have 0.

    Raises:
        ValueError: mask is not 2-dimensional.
    """
    return (turn_starts(mask).cumsum(dim=1) - 1).clamp(min=0)


def turn_starts(mask: Tensor) -> Tensor:
    """Return (B, T) bools, True at the first token of each turn; `mask` is as in `turn_numbers`."""
    check_shapes(ndim=2, mask=mask)
    mask = mask.bool()
    return mask & ~torch.nn.functional.pad(mask[:, :-1], (1, 0))


def turn_sums(values: Tensor, mask: Tensor) -> Tensor:
    """Sum the values over each turn, and give every token its turn's sum: s_t = sum of x_u over the turn of token t.

    Args:
        values: (B, T), x, any unit; log-probs add up to the log-prob of the whole turn as one action.
        mask: (B, T), as in `turn_numbers`.

    Returns:
        (B, T), the sum of each token's turn; 0 under the mask.

    Raises:
        ValueError: values is not 2-dimensional, or shapes differ.
    """
    check_shapes(ndim=2, values=values, mask=mask)
    turns, values = turn_numbers(mask), torch.where(mask.bool(), values, 0.0)
    sums = torch.zeros_like(values).scatter_add(1, turns, values)
    return torch.where(mask.bool(), sums.gather(1, turns), 0.0)
