"""Read a judge's rubric and constitution from YAML files, which reports identify by version and hash."""

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ...cli.parser import read_yaml
from ...runs import near_path

OVERALL = "overall"


@dataclass(frozen=True)
class Criteria:
    """
    Hold a rubric and the principles of a constitution, with the version and hash of their files.

    Args:
        rubric: text that says what makes an answer good on the whole.
        rubric_id: `VERSION@HASH` of the rubric's file.
        principles: name → text of a principle; empty without a constitution.
        constitution_id: `VERSION@HASH` of the constitution's file; None without a constitution.
    """

    rubric: str
    rubric_id: str
    principles: dict[str, str] = field(default_factory=dict)
    constitution_id: str | None = None

    @property
    def names(self) -> list[str]:
        """Return the names of the judge's verdicts: the names of the principles, then `overall`."""
        return [*self.principles, OVERALL]


def read_criteria(rubric: str, constitution: str | None = None) -> Criteria:
    """
    Read a rubric (`version`, `rubric`) and a constitution (`version`, `principles`: name → text), both YAML.

    Raises:
        ValueError: a file is missing, or is not YAML of this form; the message says what the file needs.
    """
    found, rubric_id = _read(rubric, "rubric", "rubric")
    if not isinstance(found, str) or not found.strip():
        raise ValueError(f"`rubric` {rubric}: its `rubric` must be a text, got {str(found)[:40]!r}")
    if constitution is None:
        return Criteria(found.strip(), rubric_id)
    return Criteria(found.strip(), rubric_id, *read_principles(constitution))


def read_principles(constitution: str) -> tuple[dict[str, str], str]:
    """
    Return the principles of a constitution (name → text), and `VERSION@HASH` of its file.

    Raises:
        ValueError: the file is missing, or is not YAML with `version` and `principles`.
    """
    principles, constitution_id = _read(constitution, "constitution", "principles")
    for name, text in principles.items() if isinstance(principles, dict) and principles else [(principles, None)]:
        is_name = isinstance(name, str) and re.fullmatch(r"[a-z][a-z0-9_]*", name) and name != OVERALL
        if not is_name or not isinstance(text, str) or not text.strip():
            raise ValueError(
                f"`constitution` {constitution}: `principles` must be names (a-z, 0-9, _; not {OVERALL!r}) with "
                f"texts, got {str(name)[:40]!r}: {str(text)[:40]!r}"
            )
    return {name: text.strip() for name, text in principles.items()}, constitution_id


def check_is_there(path: str, setting: str) -> None:
    """Raise a `ValueError` if `path`, the value of this setting, is no file."""
    if not Path(path).is_file():
        why = "is a folder: give the file in it" if Path(path).is_dir() else f"is not a file{near_path(path)}"
        raise ValueError(f"`{setting}` {path} {why}")


def _read(path: str, setting: str, key: str) -> tuple[Any, str]:
    """Return a YAML file's value of `key`, and `VERSION@HASH` of the file."""
    check_is_there(path, setting)
    content = Path(path).read_bytes()
    try:
        found = read_yaml(content.decode())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"`{setting}` {path} is not YAML: {error}") from error
    if not isinstance(found, dict) or set(found) != {"version", key} or not found["version"]:
        raise ValueError(
            f"`{setting}` {path} must have `version` and `{key}`, and nothing else, got {str(found)[:60]!r}"
        )
    return found[key], f"{str(found['version']).strip()}@{hashlib.sha256(content).hexdigest()[:12]}"
