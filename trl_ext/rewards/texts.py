"""Get a completion's text or its words, and search the text for patterns."""

from typing import Any

import regex

from ..evaluation.texts import words_of as words_of
from ..upstream.scripts import UNSPACED as UNSPACED
from .member import OnError, checked_name, checked_on_error, settled
from .scores import without_failures


def text_of(completion: Any) -> str:
    """
    Return a prompt or completion, a text or messages, as one text; the messages of tools are left out.

    >>> text_of([{"role": "user", "content": "Tea?"}])
    'Tea?'
    >>> text_of([{"role": "tool", "content": "12:00"}, {"role": "assistant", "content": "At noon."}])
    'At noon.'
    """
    if isinstance(completion, str):
        return completion
    contents = (turn.get("content") for turn in completion if turn.get("role") != "tool")
    return "\n".join(str(content) for content in contents if content not in (None, ""))


def recorded(completion: Any) -> Any:
    """Return a completion as files record it: its messages if there are several or a tool call, else its text."""
    if isinstance(completion, str) or (len(completion) == 1 and not completion[0].get("tool_calls")):
        return text_of(completion)
    return completion


def well_formed(value: Any) -> Any:
    """Replace lone surrogates, which UTF-8 cannot write, by U+FFFD in a text, or in a list's or mapping's texts."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {well_formed(key): well_formed(item) for key, item in value.items()}
    return [well_formed(item) for item in value] if isinstance(value, (list, tuple)) else value


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
        self.required, self.forbidden = (
            [each] if isinstance(each, str) else [*(each or ())] for each in (required, forbidden)
        )
        self.timeout = timeout
        self.on_error = checked_on_error(on_error)
        default = "pattern" if required and forbidden else "required_pattern" if required else "forbidden_pattern"
        self.__name__ = checked_name(name, default)
        self._required, self._forbidden = (list(map(regex.compile, each)) for each in (self.required, self.forbidden))

    def __call__(
        self, prompts: list, completions: list, completion_ids: Any = None, log_metric: Any = None, **kwargs: Any
    ) -> list[float | None]:
        """Return 1.0 or 0.0 for each completion; if a search takes too long, do what `on_error` says."""
        outcomes = [self._score(row, text_of(completion)) for row, completion in enumerate(completions)]
        return without_failures(settled(self.__name__, outcomes, self.on_error, log_metric))

    def _score(self, row: int, text: str) -> float | TimeoutError:
        def is_found(pattern: Any) -> bool:
            return pattern.search(text, timeout=self.timeout) is not None

        try:
            return float(all(map(is_found, self._required)) and not any(map(is_found, self._forbidden)))
        except TimeoutError:
            return TimeoutError(
                f"a pattern took more than {self.timeout:g} s on completion {row} ({len(text):,} characters): rewrite "
                "it without nested repeats such as `(a+)+`"
            )
