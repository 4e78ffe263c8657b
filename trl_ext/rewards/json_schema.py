"""Whether an answer is JSON of a given form."""

import json
from pathlib import Path
from typing import Any

import regex

from .naming import checked_name
from .texts import last_block, text_of

_PATTERN_SECONDS = 1.0


class JSONSchemaReward:
    """
    Score 1.0 for an answer that is JSON and keeps a schema of draft 2020-12, else 0.0.

    Read is the last fenced block of the answer, or all of it if there is none. Nothing is fetched: what the schema
    refers to must stand in it. Its `pattern`s are those of the package `regex`; one that takes more than a second on
    an answer is not kept.

    Args:
        schema: the schema, or the path of a JSON file with it.
        check_formats: whether `format` (`date`, `email`, …) is checked. By the standard it is a remark.
        max_chars: characters of JSON; a longer one is not kept.
        max_depth: brackets within brackets; a deeper one is not kept.
        name: in the logs; by default `json_<title of the schema, or name of its file>`, or `json_schema`.
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
                raise ValueError(f"`schema` must be a JSON file's path; {schema!r} cannot be read: {error}") from error
        if not isinstance(schema, dict):
            raise TypeError(f"`schema` must be a mapping, or the path of a JSON file with one, got {schema!r}")
        for argument, value in [("max_chars", max_chars), ("max_depth", max_depth)]:
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"`{argument}` must be a whole number of 1 or more, got {value!r}")
        if isinstance(schema.get("title"), str):
            default = f"json_{schema['title']}"
        self.schema = schema
        self.check_formats = check_formats
        self.max_chars = max_chars
        self.max_depth = max_depth
        self.__name__ = checked_name(name, default)
        self._validator = _validator(schema, check_formats)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_validator"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._validator = _validator(self.schema, self.check_formats)

    def __call__(self, prompts: list, completions: list, completion_ids: Any = None, **kwargs: Any) -> list[float]:
        """Return 1.0 or 0.0 for each completion."""
        return [float(self._is_kept(text_of(completion))) for completion in completions]

    def _is_kept(self, text: str) -> bool:
        text = last_block(text)
        if len(text) > self.max_chars:
            return False
        try:
            value = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return False
        if _depth(value, self.max_depth) > self.max_depth:
            return False
        try:
            return self._validator.is_valid(value)
        except TimeoutError:
            return False
        except RecursionError as error:  # not by the answer, whose depth is bounded
            raise ValueError(f"{self.__name__}: `schema` refers to itself without an end") from error


def _validator(schema: dict[str, Any], check_formats: bool) -> Any:
    try:
        from jsonschema import Draft202012Validator, SchemaError, ValidationError, validators
        from jsonschema_specifications import REGISTRY
        from referencing import Resource
        from referencing.exceptions import Unresolvable
        from referencing.jsonschema import DRAFT202012
    except ImportError as error:
        raise ImportError(
            "JSONSchemaReward needs jsonschema, which is not installed: `pip install 'trl-ext[rewards]'`"
        ) from error

    def pattern(validator: Any, expression: str, value: Any, _: Any) -> Any:
        if isinstance(value, str) and not regex.search(expression, value, timeout=_PATTERN_SECONDS):
            yield ValidationError(f"{value!r} does not match {expression!r}")

    def pattern_properties(validator: Any, properties: dict[str, Any], value: Any, _: Any) -> Any:
        for expression, within in properties.items() if isinstance(value, dict) else ():
            for key in value:
                if regex.search(expression, key, timeout=_PATTERN_SECONDS):
                    yield from validator.descend(value[key], within, path=key, schema_path=expression)

    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"`schema` is no JSON schema of draft 2020-12: {error.message}") from error
    # Without a registry of ours jsonschema would fetch what a schema refers to
    registry = REGISTRY.with_resource(
        schema.get("$id", ""), Resource.from_contents(schema, default_specification=DRAFT202012)
    ).crawl()
    for reference in _references(schema):
        try:
            registry.resolver(schema.get("$id", "")).lookup(reference)
        except Unresolvable as error:
            raise ValueError(
                f"`schema` refers to {reference!r}, which is not in it, and nothing is fetched: put it under `$defs`"
            ) from error
    extended = validators.extend(Draft202012Validator, {"pattern": pattern, "patternProperties": pattern_properties})
    checker = Draft202012Validator.FORMAT_CHECKER if check_formats else None
    return extended(schema, registry=registry, format_checker=checker)


def _references(part: Any) -> list[str]:
    """All that a schema refers to beside its own parts, which begin with #."""
    if isinstance(part, list):
        return [reference for each in part for reference in _references(each)]
    if not isinstance(part, dict):
        return []
    own = [part[key] for key in ("$ref", "$dynamicRef") if isinstance(part.get(key), str)]
    return [each for each in own if not each.startswith("#")] + _references([*part.values()])


def _depth(value: Any, most: int) -> int:
    """Return how deep lists and mappings are within another, up to one more than `most`."""
    level, depth = [value], 0
    while depth <= most and (level := [each for each in level if isinstance(each, (list, dict))]):
        depth += 1
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return depth


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
