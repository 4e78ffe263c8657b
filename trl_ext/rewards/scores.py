"""Read what reward functions return: a number for each completion, or a score for each of its tokens."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def is_by_token(reward: Any) -> bool:
    """Return whether the reward of a row has a score for each token."""
    return isinstance(reward, (list, tuple)) or getattr(reward, "ndim", 0) == 1


def total_of(reward: Any) -> Any:
    """
    Return the sum of a row's token scores; return the score of a whole completion unchanged. `reward` is what a reward
    function gave the row.
    """
    return math.fsum(reward) if is_by_token(reward) else reward


def by_token(reward: Any, row: int, length: int) -> list[Any]:
    """
    Return the token scores `reward` of completion `row` as a list; raise a `ValueError` unless there is one for each
    of the completion's `length` tokens.
    """
    if len(reward) != length:
        raise ValueError(
            f"must return one score for each token of completion {row}, {length} in all; got {len(reward)}"
        )
    return reward.tolist() if hasattr(reward, "tolist") else list(reward)


def scores_in(returned: Any, count: int) -> list[Any]:
    """
    Return what a reward function returned (`returned`) as a list; raise a `TypeError` or `ValueError` unless it has
    `count` scores.
    """
    returned = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(returned, (list, tuple)):
        raise TypeError(f"must return a list with one float or None per completion, got {type(returned).__name__}")
    if len(returned) != count:
        raise ValueError(f"must return one reward for each completion, {count} in all; got {len(returned)}")
    return list(returned)


def finite_number(reward: Any, of: str) -> float:
    """
    Return a reward, a number of Python, NumPy or torch, as a float.

    Args:
        reward: the reward of a completion or of a token.
        of: what the reward is of, for the message, such as `"completion 3, token 5"`.

    Raises:
        TypeError: the reward is not a number.
        ValueError: the reward is NaN, infinite or too large for float32.
    """
    try:
        value = None if isinstance(reward, (str, bytes)) else float(reward)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        value = None
    if value is None:
        raise TypeError(f"returned {repr(reward)[:80]} for {of}; return a float")
    if not abs(value) <= torch.finfo(torch.float32).max:  # true of NaN, too
        raise ValueError(f"returned {value} for {of}; return a finite number")
    return value


def number_or_error(reward: Any, of: str) -> float | Exception | None:
    """
    Return a reward as a finite float, or None if it is None; for any other reward, return the error, which names
    what it is `of`.
    """
    try:
        return None if reward is None else finite_number(reward, of)
    except (TypeError, ValueError) as error:
        return error


def is_nan(score: Any) -> bool:
    """Return whether a score, which may be None or a list of tokens' scores, is the float NaN."""
    return isinstance(score, float) and math.isnan(score)


def without_failures(scores: Sequence[Any]) -> list[Any]:
    """Return the scores with None in place of NaN."""
    return [None if is_nan(score) else score for score in scores]


def of_rows(columns: Mapping[str, Any], rows: list[int], count: int) -> dict[str, Any]:
    """
    Cut a reward function's arguments, `columns`, down to the rows with the indices `rows`.

    An argument that is a list of `count` values, one for each row, is cut; any other is returned unchanged.
    """
    return {
        name: [values[row] for row in rows] if isinstance(values, (list, tuple)) and len(values) == count else values
        for name, values in columns.items()
    }


def log_to(
    log_metric: Callable[[str, float], None] | None, metrics: Mapping[str, float | None], reward: Any = None
) -> None:
    """
    Log the metrics that are not None; with a `reward`, as `rewards/<name of the reward>/…`.

    If `log_metric` is None, as outside TRL, nothing is logged.
    """
    prefix = "" if reward is None else f"rewards/{reward.__name__}/"
    for name, value in metrics.items():
        if value is not None and log_metric is not None:
            log_metric(prefix + name, float(value))
