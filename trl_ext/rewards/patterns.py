"""What an answer must have, and what it must not."""

from typing import Any

import regex

from .member import OnError, check_on_error, report_failures
from .naming import checked_name
from .texts import text_of


class PatternReward:
    r"""
    Score 1.0 for an answer that has every required pattern and no forbidden one, else 0.0.

    Patterns are those of the package `regex`, searched for anywhere in the answer's text. A format is one required
    pattern for all of it: `(?s)\A<think>.+?</think>\s*<answer>.+?</answer>\s*\Z`

    Args:
        required: regular expressions that must each be found.
        forbidden: regular expressions of which none may be found.
        timeout: seconds of this process' processor time that the search for one pattern in one answer may take.
        on_error: what happens where it takes longer. `"raise"` raises a `RuntimeError`; `"skip"` scores None; a number
            is the score instead. Without `"raise"` the share of such answers is logged as `rewards/<name>/failed`.
        name: in the logs; by default `required_pattern`, `forbidden_pattern` or `pattern` (both).
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
            raise ValueError("give `required` or `forbidden` patterns, got none")
        if not timeout > 0:
            raise ValueError(f"`timeout` must be more than 0 seconds, got {timeout!r}")
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
        """Return 1.0 or 0.0 for each completion."""
        scores: list[float | None] = []
        failed, cause = 0, ""
        for row, completion in enumerate(completions):
            text = text_of(completion)
            try:
                is_kept = all(
                    (pattern.search(text, timeout=self.timeout) is not None) is wanted
                    for pattern, wanted in self._rules
                )
                scores.append(float(is_kept))
            except TimeoutError as error:
                cause = (
                    f"a pattern took more than {self.timeout:g} s on completion {row} ({len(text):,} characters); "
                    "write one that cannot try every way"
                )
                if self.on_error == "raise":
                    raise RuntimeError(f"reward '{self.__name__}': {cause}, or set `on_error`") from error
                failed += 1
                scores.append(None if self.on_error == "skip" else float(self.on_error))
        if self.on_error != "raise":
            report_failures(self.__name__, failed, len(scores), cause, log_metric)
        return scores


def _compiled(pattern: Any) -> Any:
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(f"a pattern must be a text with a regular expression, got {pattern!r}")
    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
