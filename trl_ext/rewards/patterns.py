"""Search an answer for patterns that it must have, and for patterns that it must not have."""

from typing import Any

import regex

from .checks import OnError, check_on_error, check_seconds, checked_name
from .member import settled, without_failures
from .texts import text_of


class PatternReward:
    r"""
    Score 1.0 for an answer that has every required pattern and no forbidden one, else 0.0.

    Patterns are those of the package `regex`, and are searched for anywhere in the answer's text. To demand a format,
    write one required pattern for the whole answer: `(?s)\A<think>.+?</think>\s*<answer>.+?</answer>\s*\Z`

    Args:
        required: regular expressions that must each be found.
        forbidden: regular expressions that must not be found.
        timeout: seconds of processor time that the search for one pattern in one answer may take.
        on_error: what happens if a search takes longer. `"raise"` raises a `RuntimeError`; `"skip"` scores the answer
            None; a number is the answer's score. With `"skip"` or a number, the share of answers whose search took
            longer is logged as `rewards/<name>/failed`.
        name: key in the logs; by default `required_pattern`, `forbidden_pattern` or `pattern` (both).

    Examples:
        >>> from trl_ext.rewards import PatternReward
        >>> reward = PatternReward(required=[r"(?s)<think>.+?</think>"], forbidden=[r"(?i)as an AI"])
        >>> reward(prompts=["1 + 1?"] * 2, completions=["<think>Add.</think> 2", "As an AI, I cannot add."])
        [1.0, 0.0]
        >>> question, answer = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}
        >>> reward(prompts=[[question]], completions=[[answer]])
        [0.0]
    """

    def __init__(
        self,
        required: list[str] | None = None,
        forbidden: list[str] | None = None,
        timeout: float = 1.0,
        on_error: OnError = "raise",
        name: str | None = None,
    ):
        required, forbidden = ([each] if isinstance(each, str) else [*(each or ())] for each in (required, forbidden))
        if not required and not forbidden:
            raise ValueError("there is no pattern: give `required` or `forbidden`")
        check_seconds(timeout=timeout)
        self.required = required
        self.forbidden = forbidden
        self.timeout = timeout
        self.on_error = check_on_error(on_error)
        default = "pattern" if required and forbidden else "required_pattern" if required else "forbidden_pattern"
        self.__name__ = checked_name(name, default)
        self._rules = [(_compiled(p), True) for p in required] + [(_compiled(p), False) for p in forbidden]

    def __call__(
        self, prompts: list, completions: list, completion_ids: Any = None, log_metric: Any = None, **kwargs: Any
    ) -> list[float | None]:
        """Return 1.0 or 0.0 for each completion; if a search takes too long, do what `on_error` says."""
        outcomes = [self._score(row, text_of(completion)) for row, completion in enumerate(completions)]
        return without_failures(settled(self.__name__, outcomes, self.on_error, log_metric))

    def _score(self, row: int, text: str) -> float | TimeoutError:
        try:
            found = (
                (pattern.search(text, timeout=self.timeout) is not None) is wanted for pattern, wanted in self._rules
            )
            return float(all(found))
        except TimeoutError:
            return TimeoutError(
                f"a pattern took more than {self.timeout:g} s on completion {row} ({len(text):,} characters): rewrite "
                "it without nested repeats such as `(a+)+`"
            )


def _compiled(pattern: Any) -> Any:
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(f"a pattern must be a text with a regular expression, got {pattern!r}")
    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
