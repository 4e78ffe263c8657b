"""Write the text of `--help` for dataclasses."""

import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, fields
from enum import Enum
from shutil import get_terminal_size
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..runs.settings import conditions

# Inherited flags that most runs set, in a few words each
USUAL = {
    "output_dir DIR": "Folder that the run writes into, and goes on from.",
    "learning_rate R": "Learning rate of AdamW at its highest.",
    "num_train_epochs N": "Passes over the data.",
    "max_steps N": "Optimizer steps, in place of `num_train_epochs`.",
    "per_device_train_batch_size N": "Rows in a forward pass on a device.",
    "gradient_accumulation_steps N": "Forward passes to an optimizer step.",
    "logging_steps N": "Steps from one log to the next.",
    "eval_strategy no|steps|epoch": "When to evaluate; `eval_steps` with `steps`.",
    "save_steps N": "Steps from one checkpoint to the next.",
    "use_cpu BOOL": "Train on the CPU even if there is a GPU.",
}


def help_text(prog: str, description: str, kinds: Iterable[tuple[type, bool]], asked: str | None = None) -> str:
    """
    Return the text of `--help`: it describes the script's own flags, and lists the names of the inherited ones.

    Args:
        prog: name of the program.
        description: text on what the program does.
        kinds: dataclasses, each with a bool: whether the flags that it inherits from other packages are listed
            separately.
        asked: what follows `--help`. With `"all"` inherited flags are described, too; with another word, only flags
            with that word in their names.
    """
    width = min(get_terminal_size().columns, 120)
    lines = [f"usage: {prog} [--config FILE.yaml] [--FLAG VALUE ...]", "", description.strip()]
    for title, flags, is_own in _groups(kinds):
        if asked not in (None, "all"):
            flags, is_own = {name: lines_of for name, lines_of in flags.items() if asked in name}, True
        if flags:
            lines += ["", f"{title}:"]
        if is_own or asked == "all":
            lines += [
                line for name, each in flags.items() for line in _described(*each, width, asked not in (None, "all"))
            ]
        else:
            lines += textwrap.wrap(", ".join(flags), width, initial_indent="  ", subsequent_indent="  ")
    if asked is None and "per_device_train_batch_size" in "".join(lines):
        lines += ["", "Inherited flags that most runs set:"]
        lines += [f"  --{flag}".ljust(40) + text for flag, text in USUAL.items()]
    if asked is None:
        lines += ["", "`--help all` describes them all, `--help WORD` those with WORD in their names."]
    return "\n".join(lines) + "\n"


def first_sentence(text: str) -> str:
    """Return the first sentence of a help text."""
    return re.split(r"(?<!e\.g\.)(?<!i\.e\.)(?<!et al\.)(?<=\.) ", text)[0]


def types_of(hint: Any) -> tuple:
    """Return the types that a field with this type hint may have."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _groups(kinds: Iterable[tuple[type, bool]]) -> Iterator[tuple[str, dict[str, tuple[Field, Any]], bool]]:
    """
    Yield the groups of flags, with those that are inherited from other packages last.

    Each group is a triple: a title; a mapping from a flag to its field and type; whether the flags are not inherited.
    """
    inherited: list[tuple[str, dict[str, tuple[Field, Any]], bool]] = []
    seen: set[str] = set()
    for kind, is_apart in kinds:
        hints = get_type_hints(kind)  # not `field.type`: HfArgumentParser overwrites it with a simplified type
        known = {each.name: (each, hints[each.name]) for each in fields(kind) if each.init}
        mine: dict[str, tuple[Field, Any]] = {}
        for cls in kind.__mro__:
            flags = {name: known[name] for name in vars(cls).get("__annotations__", {}) if name in known.keys() - seen}
            seen |= flags.keys()
            if is_apart and not cls.__module__.startswith("trl_ext."):
                inherited.append((f"Inherited from {cls.__module__.split('.')[0]}.{cls.__name__}", flags, False))
            else:
                mine |= flags
        yield kind.__name__, mine, True
    yield from inherited


def _described(field: Field, hint: Any, width: int, in_full: bool) -> list[str]:
    types = types_of(hint)
    known = "|".join(map(str, _choices(field, types)))
    kinds = [getattr(kind, "__name__", str(kind)) for kind in types if kind is not NoneType]
    value = known if known and len(known) < 40 else " or ".join(kinds).replace("Literal", "str")
    text = " ".join(str(field.metadata.get("help", "")).replace("%%", "%").split())
    text = f"{text} {conditions(field)}".strip() if in_full else first_sentence(text)
    if known and known != value:
        text += f" One of {known.replace('|', ', ')}."
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    if default is MISSING and bool not in types:
        text += " (required)"
    elif default is not None:
        text += f" ({False if default is MISSING else getattr(default, 'value', default)})"
    head = f"  --{field.name} {value}"
    lines = textwrap.wrap(text, width, initial_indent=" " * 40, subsequent_indent=" " * 40)
    if lines and len(head) < 39:
        return [head.ljust(40) + lines[0][40:], *lines[1:]]
    return [head, *lines]


def _choices(field: Field, types: tuple) -> list[Any]:
    for kind in types:
        if get_origin(kind) is Literal:
            return list(get_args(kind))
        if isinstance(kind, type) and issubclass(kind, Enum):
            return [each.value for each in kind]
    return list(field.metadata.get("choices", ()))
