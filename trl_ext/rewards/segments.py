"""Score each token of a completion, or each of its segments."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SegmentScores:
    """
    Score the segments of a completion, such as sentences or steps, each at the token that ends it.

    A reward function of [`~trl_ext.PPOTrainer`] may return this for a row in place of one float. It stands for a list
    with one float per token: a segment's score at the segment's last token, 0 at all other tokens.

    Args:
        ends: position of each segment's last token in the row's `completion_ids`, from 0 on, rising.
        values: score of each segment.

    Raises:
        ValueError: `ends` and `values` differ in length, or `ends` are not rising positions.

    Examples:
        >>> from trl_ext.rewards import SegmentScores
        >>> SegmentScores(ends=[1, 3], values=[0.5, -1.0]).by_token(5)
        [0.0, 0.5, 0.0, -1.0, 0.0]
    """

    ends: Sequence[int]
    values: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.ends) != len(self.values):
            raise ValueError(
                f"`ends` and `values` must have the same length, got {len(self.ends)} and {len(self.values)}"
            )
        ends = list(self.ends)
        if not all(a < b for a, b in zip([-1, *ends], ends, strict=False)):
            raise ValueError(f"`ends` must be rising token positions, 0 or more, got {ends}")

    def by_token(self, length: int) -> list[float]:
        """
        Return a float for each of `length` tokens: a segment's value at its last token, 0 at all other tokens.

        Raises:
            ValueError: a segment ends after the last token.
        """
        if len(self.ends) and self.ends[-1] >= length:
            raise ValueError(
                f"a segment ends at token {self.ends[-1]}, but the completion has {length} tokens, counted from 0"
            )
        scores = [0.0] * length
        for end, value in zip(self.ends, self.values, strict=True):
            scores[end] = value
        return scores


def is_by_token(reward: Any) -> bool:
    """Return whether the reward of a row has a score for each token."""
    return isinstance(reward, (SegmentScores, list, tuple)) or getattr(reward, "ndim", 0) == 1


def total_of(reward: Any) -> Any:
    """Return the sum of a row's token scores; return the score of a whole completion unchanged."""
    if not is_by_token(reward):
        return reward
    return math.fsum(reward.values if isinstance(reward, SegmentScores) else reward)


def by_token(reward: Any, row: int, length: int) -> list:
    """Return the token scores of completion `row` as a list; raise a `ValueError` unless each token has one."""
    if isinstance(reward, SegmentScores):
        try:
            return reward.by_token(length)
        except ValueError as error:
            raise ValueError(f"returned {reward} for completion {row}: {error}") from error
    if len(reward) != length:
        raise ValueError(
            f"returned {len(reward)} token scores for completion {row}, which has {length} tokens: return one for "
            "each of its `completion_ids`, or one float, or None"
        )
    return reward.tolist() if hasattr(reward, "tolist") else list(reward)
