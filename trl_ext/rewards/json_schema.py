"""Check answers that must be JSON of a given form."""

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from decimal import Decimal, InvalidOperation
from functools import wraps
from pathlib import Path
from typing import Any

import regex

from ..upstream.packages import need
from .checks import PicklesSettings, check_counts, checked_name
from .texts import last_block, text_of

_PATTERN_SECONDS = 1.0  # of a single search
_SECONDS = 5.0  # of the whole check of an answer
_LONGEST_NUMBER = 4300  # digits; Python reads no longer whole numbers
_LONGEST_EXPRESSION = 500  # characters of a text with `format: regex`


class JSONSchemaReward(PicklesSettings):
    """
    Score 1.0 for an answer that is JSON and follows a JSON Schema (draft 2020-12), else 0.0.

    The JSON is the last fenced block of the answer, or the whole answer if it has none. The schema must contain all
    that it refers to; nothing is fetched. Its `pattern`s are regular expressions of the package `regex`. An answer
    scores 0.0 if the search for one pattern in one text takes more than a second of processor time, or the whole check
    more than five. Numbers are read as exact decimals, so that 0.07 is a multiple of 0.01; an answer with a number of
    more than 4,300 digits scores 0.0.

    Args:
        schema: the schema, or the path of a JSON file with it.
        check_formats: whether an answer must keep to the schema's `format` (`date`, `email`, …). By the standard
            `format` is only a note to the reader.
        max_chars: most characters of the JSON; longer JSON scores 0.0.
        max_depth: most brackets within brackets; deeper JSON scores 0.0.
        name: key in the logs; by default `json_<title of the schema, or name of its file>`, or `json_schema`.

    Examples:
        >>> from trl_ext.rewards import JSONSchemaReward
        >>> reward = JSONSchemaReward({"properties": {"age": {"type": "integer"}}, "required": ["age"]})
        >>> reward(prompts=["Ada, 36?"] * 3, completions=['{"age": 36}', '{"age": "36"}', "She is 36."])
        [1.0, 0.0, 0.0]
    """

    def __init__(
        self,
        schema: dict[str, Any] | str,
        check_formats: bool = False,
        max_chars: int = 20_000,
        max_depth: int = 32,
        name: str | None = None,
    ):
        default = "json_schema"
        if isinstance(schema, str):
            default = f"json_{Path(schema).stem}"
            try:
                schema = json.loads(Path(schema).read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"`schema` {schema!r} cannot be read as a JSON file: {error}. Give a file's path, or a mapping"
                ) from error
        if not isinstance(schema, dict):
            raise TypeError(f"`schema` must be a mapping, or the path of a JSON file with one, got {schema!r}")
        check_counts(max_chars=max_chars, max_depth=max_depth)
        if isinstance(schema.get("title"), str):
            default = f"json_{schema['title']}"
        self.schema = schema
        self.check_formats = check_formats
        self.max_chars = max_chars
        self.max_depth = max_depth
        self.__name__ = checked_name(name, default)
        self._set_up()

    def _set_up(self) -> None:
        self._follows = _checker(self.schema, self.check_formats)

    def __call__(self, prompts: list, completions: list, completion_ids: Any = None, **kwargs: Any) -> list[float]:
        """Return 1.0 or 0.0 for each completion."""
        return [float(self._score(last_block(text_of(completion)))) for completion in completions]

    def _score(self, text: str) -> bool:
        if len(text) > self.max_chars:
            return False
        try:
            value = json.loads(text, parse_float=_decimal, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return False
        try:
            return _depth(value, self.max_depth) <= self.max_depth and self._follows(value)
        except (TimeoutError, RecursionError):
            return False
        except _EndlessError as error:  # the schema's fault, not the answer's
            raise ValueError(
                f"{self.__name__}: `schema` has a reference that leads back to itself: remove the circle"
            ) from error


class _EndlessError(Exception):
    """Say that a schema refers to itself without end."""


class _Check(threading.local):
    """Hold the state of checking one answer in one thread: the deadline, and the `$ref`s being followed."""

    until = 0.0
    followed: set[tuple[int, int]] = set()

    def begin(self) -> None:
        self.until, self.followed = time.thread_time() + _SECONDS, set()

    def left(self) -> float:
        """Return the seconds of processor time left for the check; raise a `TimeoutError` if none are."""
        if (left := self.until - time.thread_time()) <= 0:
            raise TimeoutError
        return left


def _checker(schema: dict[str, Any], check_formats: bool) -> Callable[[Any], bool]:
    """
    Return a function that says whether a value follows the schema, and raises a `TimeoutError` if time runs out.

    Raises:
        ValueError: the schema is wrong, refers to something that it does not contain, or could take forever to check.
    """
    need("jsonschema", "JSONSchemaReward")
    from jsonschema import Draft202012Validator, SchemaError, ValidationError, validators
    from jsonschema_specifications import REGISTRY
    from referencing import Resource
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    check = _Check()

    def is_found(expression: str, text: str) -> bool:
        return regex.search(expression, text, timeout=min(_PATTERN_SECONDS, check.left())) is not None

    def pattern(validator: Any, expression: str, value: Any, _: Any) -> Any:
        if isinstance(value, str) and not is_found(expression, value):
            yield ValidationError("does not match")

    def pattern_properties(validator: Any, properties: dict[str, Any], value: Any, _: Any) -> Any:
        for expression, within in properties.items() if isinstance(value, dict) else ():
            for key in value:
                if is_found(expression, key):
                    yield from validator.descend(value[key], within, path=key, schema_path=expression)

    def additional_properties(validator: Any, within: Any, value: Any, of: dict[str, Any]) -> Any:
        for key in value if isinstance(value, dict) else ():
            is_named = key in of.get("properties", {})
            if not is_named and not any(is_found(each, key) for each in of.get("patternProperties", {})):
                yield from validator.descend(value[key], within, path=key)

    def multiple_of(validator: Any, factor: Any, value: Any, _: Any) -> Any:
        if validator.is_type(value, "number") and not _is_multiple(value, factor):
            yield ValidationError("is not a multiple")

    def unique_items(validator: Any, is_wanted: bool, value: Any, _: Any) -> Any:
        if is_wanted and isinstance(value, list) and len(set(map(_hashable, value))) < len(value):
            yield ValidationError("has something twice")

    def format_(validator: Any, name: str, value: Any, of: dict[str, Any]) -> Any:
        try:  # `format: regex` compiles the value, which may raise any error, or take minutes
            is_long = name == "regex" and isinstance(value, str) and len(value) > _LONGEST_EXPRESSION
            wrong = is_long or any(Draft202012Validator.VALIDATORS["format"](validator, name, value, of))
        except Exception:
            wrong = True
        if wrong:
            yield ValidationError("is not of the format")

    def in_time(keyword: Callable) -> Callable:
        @wraps(keyword)
        def checked(validator: Any, *given: Any) -> Any:
            check.left()
            return keyword(validator, *given)

        return checked

    def following(keyword: Callable) -> Callable:
        @wraps(keyword)
        def checked(validator: Any, reference: str, value: Any, of: dict[str, Any]) -> Any:
            if (step := (id(of), id(value))) in check.followed:
                raise _EndlessError
            check.followed.add(step)
            try:
                yield from keyword(validator, reference, value, of)
            finally:
                check.followed.discard(step)

        return checked

    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"`schema` is not a JSON schema of draft 2020-12: {error.message}") from error
    if {"unevaluatedProperties", "patternProperties"} <= {key for part in _mappings(schema) for key in part}:
        raise ValueError(
            "`schema` has `unevaluatedProperties` and `patternProperties`. To check both together may take forever: "
            "use `additionalProperties`, or name the keys in `properties`"
        )
    exact = _exact(schema)
    # Without a registry jsonschema would fetch what a schema refers to
    registry = REGISTRY.with_resource(
        schema.get("$id", ""), Resource.from_contents(exact, default_specification=DRAFT202012)
    ).crawl()
    given = (part.get(name) for part in _mappings(schema) for name in ("$ref", "$dynamicRef"))
    for reference in given:
        if not isinstance(reference, str) or reference.startswith("#"):  # `#…` is a part of the schema
            continue
        try:
            registry.resolver(schema.get("$id", "")).lookup(reference)
        except Unresolvable as error:
            raise ValueError(
                f"`schema` refers to {reference!r}, but does not contain it, and no file is fetched: put it under "
                "`$defs`"
            ) from error
    keywords = Draft202012Validator.VALIDATORS | {
        "pattern": pattern,
        "patternProperties": pattern_properties,
        "additionalProperties": additional_properties,
        "multipleOf": multiple_of,
        "uniqueItems": unique_items,
        "format": format_,
    }
    keywords |= {name: following(keywords[name]) for name in ("$ref", "$dynamicRef")}
    extended = validators.extend(
        Draft202012Validator,
        {name: in_time(keyword) for name, keyword in keywords.items()},
        type_checker=Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: _is_whole(value)),
    )
    checker = Draft202012Validator.FORMAT_CHECKER if check_formats else None
    validator = extended(exact, registry=registry, format_checker=checker)

    def follows(value: Any) -> bool:
        check.begin()
        return validator.is_valid(value)

    return follows


def _decimal(text: str) -> Decimal:
    """Read a JSON number exactly; raise a `ValueError` if it has too many digits or too large an exponent."""
    if len(text) > _LONGEST_NUMBER:
        raise ValueError(f"a number of {len(text)} characters")
    try:
        return Decimal(text)
    except InvalidOperation as error:
        raise ValueError(f"{text} is too large") from error


def _exact(part: Any, is_data: bool = False) -> Any:
    """
    Return a schema with its floats as decimals, and without `$schema`.

    jsonschema would check a part that has `$schema` by its standard keywords, not by ours, which have time limits.
    """
    if isinstance(part, dict):
        return {
            key: _exact(each, is_data or key in ("const", "enum"))
            for key, each in part.items()
            if is_data or key != "$schema" or not isinstance(each, str)
        }
    if isinstance(part, list):
        return [_exact(each, is_data) for each in part]
    if isinstance(part, float) and not math.isfinite(part):
        raise ValueError(f"`schema` has the number {part}, which JSON does not have: remove it")
    return Decimal(repr(part)) if isinstance(part, float) else part


def _mappings(part: Any) -> Iterator[dict[str, Any]]:
    """Yield each mapping in a schema, at any depth, the schema itself included."""
    if isinstance(part, dict):
        yield part
    for each in part if isinstance(part, list) else part.values() if isinstance(part, dict) else ():
        yield from _mappings(each)


def _is_whole(value: Any) -> bool:
    if isinstance(value, Decimal):
        return value.is_finite() and value == value.to_integral_value()
    return isinstance(value, int) and not isinstance(value, bool)


def _is_multiple(value: Any, factor: Any) -> bool:
    """Return whether a number is a whole multiple of another number, exactly, even with huge exponents."""
    (a, m), (b, n) = _scaled(value), _scaled(factor)
    # a·10^m / b·10^n is whole if b divides a·10^(m − n). With m < n it is not, as a ends with no 0
    return a == 0 or (m >= n and a * pow(10, m - n, b) % b == 0)


def _scaled(value: Any) -> tuple[int, int]:
    """Write a decimal number as a·10^m, with an integer a that does not end with 0; return a and m."""
    _, digits, exponent = Decimal(value).as_tuple()
    zeros = next((i for i, digit in enumerate(reversed(digits)) if digit), 0)
    # Through a decimal: `int` refuses a text of so many digits
    return int(Decimal((0, digits[: len(digits) - zeros], 0))), int(exponent) + zeros


def _hashable(value: Any) -> Any:
    """Convert a JSON value to a hashable one, equal for equal JSON: 1 equals 1.0, but not true."""
    if isinstance(value, list):
        return "list", tuple(map(_hashable, value))
    if isinstance(value, dict):
        return "dict", frozenset((key, _hashable(each)) for key, each in value.items())
    return (type(value).__name__ if isinstance(value, (bool, str)) else "", value)


def _depth(value: Any, most: int) -> int:
    """Return the depth of nested lists and mappings in a JSON value, counted up to `most` + 1."""
    level, depth = [value], 0
    while depth <= most and (level := [each for each in level if isinstance(each, (list, dict))]):
        depth += 1
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return depth


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
