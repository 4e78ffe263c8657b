"""Declare settings with their meaning and range in one place, for checks, `--help` and the docs."""

import math
import operator
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from functools import partial
from inspect import cleandoc, formatannotation
from numbers import Integral
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

Range = str | tuple[str, Callable[[Any], bool]]
OnlyWith = tuple[str, Any]
_Class = TypeVar("_Class", bound=type)


class _Help(str):
    """Hold a field's help text together with the rules for its values."""

    # Not metadata of the field: HfArgumentParser would pass them to argparse, which refuses them
    range: Range | None = None
    only_with: OnlyWith | None = None


def setting(default: Any, help: str, range: Range | None = None, only_with: OnlyWith | None = None) -> Any:
    """
    Declare a field of a configuration, with its default, description and rules.

    Args:
        help: meaning and unit. `--help` shows the first sentence; `--help WORD` and the docs show all. No percent
            signs: argparse takes them for formats.
        range: allowed values: a rule that [`meets`] understands, or a tuple of a rule in words and a function that
            tests it.
        only_with: name and value of another setting that this setting needs. If the other setting has a different
            value, this setting must keep its default.
    """
    text = _Help(help)
    text.range = range
    text.only_with = only_with
    return field(default=default, metadata={"help": text})


def meets(value: Any, rule: str) -> bool:
    """Return whether a number meets a rule such as `">= 1 token"`, `"> 0 and finite"` or `"in [0, 1), a share"`."""
    if interval := re.match(r"in ([\[(])(\S+), ([^])]+)([])])", rule):
        left, low, high, right = interval.groups()
        bounds = [(">=" if left == "[" else ">", low), ("<=" if right == "]" else "<", high)]
    else:
        bounds = re.findall(r"(>=?) (\S+\b)", rule)
    compare = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
    return all(compare[sign](value, float(bound)) for sign, bound in bounds) and (
        "finite" not in rule or value < math.inf
    )


def rules_of(each: Field) -> tuple[Range | None, OnlyWith | None]:
    """Return the rules `range` and `only_with` of a field that [`setting`] declared; None for a rule it lacks."""
    text = each.metadata.get("help", "")
    return (text.range, text.only_with) if isinstance(text, _Help) else (None, None)


def conditions(each: Field) -> str:
    """
    Describe in sentences the allowed values of the field `each` and the other setting that it needs; "" if it has no
    rules.
    """
    rule, only_with = rules_of(each)
    sentences = []
    if rule:
        sentences.append(f"Must be {rule if isinstance(rule, str) else rule[0]}.")
    if only_with:
        sentences.append(f"Only with `{only_with[0]}={only_with[1]!r}`.")
    return " ".join(sentences)


def documented(cls: _Class) -> _Class:
    """Decorate a dataclass: append to its docstring the settings that it, or a mixin of trl_ext, declares."""
    known = {each.name: each for each in fields(cls)}
    lines = []
    for kind in cls.__mro__:
        names = kind.__annotations__ if kind is cls or kind.__module__.startswith("trl_ext.") else ()
        for each in (known.pop(name) for name in [*names] if name in known):
            text = f"{each.metadata.get('help', '')} {conditions(each)}"
            lines.append(f"{each.name} (`{formatannotation(each.type)}`, defaults to `{each.default!r}`):")
            lines.append(textwrap.fill(text, 110, initial_indent="    ", subsequent_indent="    "))
    cls.__doc__ = f"{cleandoc(cls.__doc__ or '')}\n\nParameters:\n" + textwrap.indent("\n".join(lines), "    ")
    return cls


@dataclass
class RunSettings:
    """Add settings to `TrainingArguments`: which files a run writes, and how, and whether it resumes after a stop."""

    save_in_background: bool = setting(
        False,
        "Write checkpoints while training continues: into memory first, from where a thread moves them to "
        "`output_dir`. At most one checkpoint is written at a time, and `train` returns when the last one is "
        "complete. Training waits for the first one, to measure how much memory a checkpoint takes.",
    )
    staging_dir: str | None = setting(
        None,
        "Folder that `save_in_background` writes to first; `/dev/shm`, which is memory, if unset. All machines of a "
        "run must see it.",
        only_with=("save_in_background", True),
    )
    on_save_failure: Literal["stop", "continue"] = setting(
        "stop",
        "What happens if a checkpoint cannot be written, for example because the disk is full. `stop` ends the run "
        "with a message that says why; `continue` prints the reason and continues training. The incomplete "
        "checkpoint is removed.",
    )
    record_run: bool = setting(
        True,
        "Write the run's logs, and a page that shows them, into `output_dir`. The files are `metrics.rank0.jsonl`, "
        "with PPO some completions of each rollout, and `report.html` when training ends. Only the main process "
        "writes; a file that cannot be written leads to a warning.",
    )
    resume_anyway: bool = setting(False, "Resume a run that a monitor has stopped; otherwise it stays stopped.")

    def __post_init__(self):
        super().__post_init__()  # type: ignore[misc]
        check_settings(self)


@dataclass
class AnswersSettings:
    """Add `record_answers` to configurations of trainers that generate no completions by themselves."""

    record_answers: int = setting(
        0,
        "Number of prompts to answer before training, at each evaluation and at the end, for the run's page. They "
        "are the first prompts of the evaluation rows, or of the training rows if there are none. Completions are "
        "greedy and have at most 128 tokens.",
        range=">= 0 prompts",
        only_with=("record_run", True),
    )


def resolve_for_device(config: Any, activation_checkpointing: bool = False) -> None:
    """
    Set `bf16` and activation checkpointing where they are unset.

    `bf16` is off on a CPU. On a GPU it is on unless `fp16` is, as in TRL. Activation checkpointing gets the value of
    its deprecated name `gradient_checkpointing`. If neither is set, the argument turns it on for a GPU.
    Without a GPU, `dataloader_pin_memory` is set to False.
    """
    import torch  # takes seconds: a mistyped setting is refused before

    has_gpu = torch.accelerator.is_available()
    on_gpu = has_gpu and not config.use_cpu
    config.dataloader_pin_memory &= has_gpu  # else torch warns that it does nothing
    if config.bf16 is None:
        config.bf16 = on_gpu and not config.fp16
    for end in ("checkpointing", "checkpointing_kwargs"):
        if getattr(config, f"activation_{end}") is None:
            setattr(config, f"activation_{end}", getattr(config, f"gradient_{end}"))
    if config.activation_checkpointing is None:
        config.activation_checkpointing = activation_checkpointing and on_gpu


def check_settings(
    config: Any, ranges: Mapping[str, Range] | None = None, only_with: Mapping[str, OnlyWith] | None = None
) -> None:
    """
    Raise a `ValueError` for the first field whose value breaks a rule of its [`setting`].

    Args:
        config: a dataclass instance. Whole numbers, `Literal` choices, ranges and `only_with` are checked; `None`
            passes where the field's type allows it.
        ranges: ranges of fields that another package declares, by the field's name, in the form of [`setting`].
        only_with: the rule `only_with` of such fields, by the field's name, in the form of [`setting`].

    Raises:
        ValueError: a value breaks a rule; the message has the field, its value, and what to do.
    """
    if wrong := next(_wrong(config, ranges or {}, only_with or {}), None):
        raise ValueError(wrong)


def _wrong(config: Any, ranges: Mapping[str, Range], only_with: Mapping[str, OnlyWith]) -> Iterator[str]:
    """Yield a sentence for each broken rule. A rule in `ranges` or `only_with` replaces the field's own."""
    hints = get_type_hints(type(config))  # not `field.type`: HfArgumentParser overwrites it
    for each in fields(config):
        name = each.name
        hint = hints[each.name]
        value = getattr(config, each.name)
        is_whole = isinstance(value, Integral) and not isinstance(value, bool)
        if (hint is int and not is_whole) or (hint == int | None and not (is_whole or value is None)):
            yield f"`{name}` must be a whole number, got {value!r}."
        literal = next((t for t in (hint, *get_args(hint)) if get_origin(t) is Literal), None)
        if literal and value not in (*get_args(literal), *([None] if literal is not hint else [])):
            yield f"`{name}` must be one of {list(get_args(literal))}, got {value!r}."
        allowed = ranges.get(name) or rules_of(each)[0]
        needs = only_with.get(name) or rules_of(each)[1]
        if allowed is not None:
            if isinstance(allowed, str):
                allowed = allowed, partial(meets, rule=allowed)
            rule, is_valid = allowed
            try:
                is_right = hint is not float if value is None else is_valid(value)
            except TypeError:  # text, or one number for several
                is_right = False
            if not is_right:
                yield f"`{name}` must be {rule}, got {value!r}."
        if needs and value != each.default and (found := getattr(config, needs[0])) != needs[1]:
            yield (
                f"`{name}={value}` needs `{needs[0]}={needs[1]!r}`, but `{needs[0]}={found!r}`. Set "
                f"`{needs[0]}={needs[1]!r}`, or leave `{name}` out."
            )
