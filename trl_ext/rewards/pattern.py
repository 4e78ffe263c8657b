"""Score completions by regular expressions."""

from typing import Any

import regex

from .completions import text_of
from .member import MarksFailures, OnError, checked_name, checked_on_error, with_failures_as_nan


class PatternReward(MarksFailures):
    r"""
    Score 1.0 for a completion that has every required pattern and no forbidden one, else 0.0.

    Patterns have the syntax of the package `regex`, and are searched for anywhere in the completion's text. To demand
    a format, write one required pattern for the whole completion:
    `(?s)\A<think>.+?</think>\s*<answer>.+?</answer>\s*\Z`

    Args:
        required: regular expressions that must each be found.
        forbidden: regular expressions that must not be found.
        timeout: seconds of processor time that the search for one pattern in one completion may take.
        on_error: what happens if a search takes longer. `"raise"` raises a `RuntimeError`; `"skip"` scores the
            completion None, and the share of completions whose search took longer is logged as
            `rewards/<name>/failed`.
        name: key in the logs; by default `required_pattern`, `forbidden_pattern` or `pattern` (both).

    Examples:
        >>> from trl_ext.rewards import PatternReward
        >>> reward = PatternReward(required=[r"(?s)<think>.+?</think>"], forbidden=[r"(?i)as an AI"])
        >>> reward(prompts=["1 + 1?"] * 2, completions=["<think>Add.</think> 2", "As an AI, I cannot add."])
        [1.0, 0.0]
        >>> prompt, completion = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}
        >>> reward(prompts=[[prompt]], completions=[[completion]])
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
        self.required, self.forbidden = (
            [each] if isinstance(each, str) else [*(each or ())] for each in (required, forbidden)
        )
        self.timeout = timeout
        self.on_error = checked_on_error(on_error)
        default = "required_pattern" if required else "forbidden_pattern"
        if required and forbidden:
            default = "pattern"
        self.__name__ = checked_name(name, default)
        self._required = list(map(regex.compile, self.required))
        self._forbidden = list(map(regex.compile, self.forbidden))

    def scores_or_nan(
        self, prompts: list, completions: list, completion_ids: Any = None, log_metric: Any = None, **kwargs: Any
    ) -> list[float | None]:
        """
        Return 1.0 or 0.0 for each completion; NaN if a search takes too long and `on_error` is "skip".

        The arguments are those of a reward function; `log_metric`, TRL's function that logs, may be None.
        """
        outcomes = [self._score(row, text_of(completion)) for row, completion in enumerate(completions)]
        return with_failures_as_nan(self.__name__, outcomes, self.on_error, log_metric)

    def _score(self, row: int, text: str) -> float | TimeoutError:
        """Return a text's score, or the error if a search takes too long."""

        def is_found(pattern: Any) -> bool:
            return pattern.search(text, timeout=self.timeout) is not None

        try:
            return float(all(map(is_found, self._required)) and not any(map(is_found, self._forbidden)))
        except TimeoutError:
            return TimeoutError(
                f"a pattern took more than {self.timeout:g} s on completion {row} ({len(text):,} characters): rewrite "
                "it without nested repeats such as `(a+)+`"
            )
