"""Declare settings with their meaning and range in one place, which checks, `--help` and the docs read."""

import math
import operator
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from functools import partial
from inspect import cleandoc, formatannotation
from numbers import Integral
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

Range = str | tuple[str, Callable[[Any], bool]]
OnlyWith = tuple[str, Any]
_Class = TypeVar("_Class", bound=type)


class _Help(str):
    """
    Hold a field's help text together with the rules for its values.

    The rules cannot be separate metadata of the field: HfArgumentParser would pass them to argparse, which refuses
    them.
    """

    range: Range | None = None
    only_with: OnlyWith | None = None


def setting(default: Any, help: str, range: Range | None = None, only_with: OnlyWith | None = None) -> Any:
    """
    Declare a field of a configuration: the one place where a setting is described.

    Args:
        default: default value.
        help: meaning and unit. `--help` shows the first sentence; `--help WORD` and the docs show all. No percent
            signs: argparse takes them for formats.
        range: allowed values: a rule that [`meets`] understands, or a rule in words with a function that tests it.
        only_with: name and value of another setting. If the other setting has a different value, this one has no
            effect, and is refused unless it is at its default.
    """
    text = _Help(help)
    text.range, text.only_with = range, only_with
    return field(default=default, metadata={"help": text})


def meets(value: Any, rule: str) -> bool:
    """
    Return whether a number meets a rule such as `">= 1 token"`, `"> 0 and finite"` or `"in [0, 1), a share"`.

    Raises:
        ValueError: the rule has no bound.
    """
    if interval := re.match(r"in ([\[(])(\S+), ([^])]+)([])])", rule):
        left, low, high, right = interval.groups()
        bounds = [(">=" if left == "[" else ">", low), ("<=" if right == "]" else "<", high)]
    else:
        bounds = re.findall(r"(>=?) (\S+\b)", rule)
    if not bounds:
        raise ValueError(f"{rule!r} has no bound: write it as '> 0' or 'in [0, 1]', or pass a test as well.")
    compare = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
    return all(compare[sign](value, float(bound)) for sign, bound in bounds) and (
        "finite" not in rule or value < math.inf
    )


def rules_of(each: Field) -> tuple[Range | None, OnlyWith | None]:
    """Return the `range` and the `only_with` of a field, as [`setting`] takes them; None for one that it lacks."""
    text = each.metadata.get("help", "")
    return (text.range, text.only_with) if isinstance(text, _Help) else (None, None)


def conditions(each: Field) -> str:
    """Return sentences on a field's allowed values and on the other setting that it needs; "" if it has no rules."""
    rule, only_with = rules_of(each)
    sentences = []
    if rule:
        sentences.append(f"Must be {rule if isinstance(rule, str) else rule[0]}.")
    if only_with:
        sentences.append(f"Only with `{only_with[0]}={only_with[1]!r}`.")
    return " ".join(sentences)


def documented(cls: _Class) -> _Class:
    """Append to a dataclass's docstring the settings that the class itself and mixins of trl_ext declare."""
    known, lines = {each.name: each for each in fields(cls)}, []
    for kind in cls.__mro__:
        names = kind.__annotations__ if kind is cls or kind.__module__.startswith("trl_ext.") else ()
        for each in (known.pop(name) for name in [*names] if name in known):
            text = f"{each.metadata.get('help', '')} {conditions(each)}"
            lines.append(f"{each.name} (`{formatannotation(each.type)}`, defaults to `{each.default!r}`):")
            lines.append(textwrap.fill(text, 110, initial_indent="    ", subsequent_indent="    "))
    cls.__doc__ = f"{cleandoc(cls.__doc__ or '')}\n\nParameters:\n" + textwrap.indent("\n".join(lines), "    ")
    return cls


@dataclass
class SavingSettings:
    """Add settings to `TrainingArguments`: which files a run writes, and how."""

    save_in_background: bool = setting(
        False,
        "Write checkpoints while training goes on: into memory first, from where a thread moves them to `output_dir`. "
        "At most one is being written, and `train` returns when the last one is complete. The first one of a run is "
        "waited for, since it says how much memory one takes.",
    )
    staging_dir: str | None = setting(
        None,
        "Folder that `save_in_background` writes to first; `/dev/shm`, which is memory, if unset. All machines of a "
        "run must see it.",
        only_with=("save_in_background", True),
    )
    on_save_failure: Literal["stop", "continue"] = setting(
        "stop",
        "What follows if a checkpoint could not be written. If the disk is full, say, `stop` ends the run with one "
        "sentence; `continue` prints it and goes on. What was written of the checkpoint is removed.",
    )
    record_run: bool = setting(
        True,
        "Write what the run logs, and a page of it, into `output_dir`. They are `metrics.rank0.jsonl`, with PPO some "
        "completions of each rollout, and `report.html` when training ends. The main process alone writes; what "
        "cannot be written is a warning.",
    )

    def __post_init__(self):
        super().__post_init__()  # type: ignore[misc]
        check_settings(self)


@dataclass
class AnswersSettings:
    """Add a setting to configurations of trainers that generate no answers by themselves."""

    record_answers: int = setting(
        0,
        "Prompts to answer before training, at each evaluation and at the end, for the page: the first of the "
        "evaluation rows, or without these of the training rows. Answers are greedy and have at most 128 tokens.",
        range=">= 0 prompts",
        only_with=("record_run", True),
    )


def resolve_bf16(config: Any) -> None:
    """
    Set `bf16` if it is unset: on a CPU to False; on a GPU, as TRL does, to True unless `fp16` is set.

    Raises:
        ValueError: `bf16=True` without a GPU and without `use_cpu=True`, or `fp16=True` on a CPU.
    """
    import torch  # takes seconds: a mistyped setting is refused before

    no_gpu = not torch.accelerator.is_available()
    config.dataloader_pin_memory &= not no_gpu  # torch would warn that it does nothing
    if config.fp16 and (no_gpu or config.use_cpu):
        raise ValueError("`fp16=True` does nothing on a CPU: leave it out to train in float32, or use a GPU.")
    if config.bf16 is None:
        config.bf16 = not (config.fp16 or config.use_cpu or no_gpu)
    elif config.bf16 and no_gpu and not config.use_cpu:
        raise ValueError(
            "`bf16=True`, but there is no GPU: set `bf16=False` to train on the CPU in float32, or `use_cpu=True` if "
            "you do want bfloat16 there."
        )


def resolve_for_cpu(config: Any) -> None:
    """
    Set `bf16` and gradient checkpointing where they are unset: off on a CPU, where both cost time, else as TRL does.

    A setting that is set is kept: `bf16=True` on a CPU trains in bfloat16.
    """
    import torch  # takes seconds: a mistyped setting is refused before

    config.dataloader_pin_memory &= torch.accelerator.is_available()  # else torch warns that it does nothing
    on_cpu = config.use_cpu or not torch.accelerator.is_available()
    if config.bf16 is None and on_cpu:
        config.bf16 = False
    if config.gradient_checkpointing is None and config.activation_checkpointing is None:  # two names of one setting
        config.activation_checkpointing = not on_cpu


def resolve_checkpointing(config: Any) -> None:
    """Copy the settings of the deprecated name `gradient_checkpointing` to `activation_checkpointing`, if unset."""
    for end in ("checkpointing", "checkpointing_kwargs"):
        if getattr(config, f"activation_{end}") is None:
            setattr(config, f"activation_{end}", getattr(config, f"gradient_{end}"))


def check_settings(
    config: Any, ranges: Mapping[str, Range] | None = None, only_with: Mapping[str, OnlyWith] | None = None
) -> None:
    """
    Raise an error for the first field whose value breaks a rule of its [`setting`].

    Args:
        config: a dataclass instance. Whole numbers, `Literal` choices, ranges and `only_with` are checked; `None`
            passes where the field's type allows it.
        ranges: mapping from the name of a field that another package declares to its range, as [`setting`] takes it.
        only_with: mapping from the name of such a field to its `only_with`, as [`setting`] takes it.

    Raises:
        ValueError: a value breaks a rule; the message has the field, its value, and what to do.
    """
    hints = get_type_hints(type(config))  # not `field.type`: HfArgumentParser overwrites it
    for name, hint in hints.items():
        value = getattr(config, name)
        if hint not in (int, int | None) or (value is None and hint is not int):
            continue
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise ValueError(f"`{name}` must be a whole number, got {value!r}.")
    for each in fields(config):
        allowed = (ranges or {}).get(each.name) or rules_of(each)[0]
        if allowed is None:
            continue
        value = getattr(config, each.name)
        rule, is_valid = (allowed, None) if isinstance(allowed, str) else allowed
        try:
            is_right = (
                hints[each.name] is not float if value is None else (is_valid or partial(meets, rule=rule))(value)
            )
        except TypeError:  # text, or one number for several
            is_right = False
        if not is_right:
            raise ValueError(f"`{each.name}` must be {rule}, got {value!r}.")
    for name, hint in hints.items():
        literal = next((t for t in (hint, *get_args(hint)) if get_origin(t) is Literal), None)
        choices = [*get_args(literal), *([None] if literal is not hint else [])]
        if literal and getattr(config, name) not in choices:
            raise ValueError(f"`{name}` must be one of {list(get_args(literal))}, got {getattr(config, name)!r}.")
    for each in fields(config):
        other, needed = (only_with or {}).get(each.name) or rules_of(each)[1] or (None, None)
        value = getattr(config, each.name)
        if other and value != each.default and (found := getattr(config, other)) != needed:
            raise ValueError(
                f"`{each.name}={value}` needs `{other}={needed!r}`, but `{other}={found!r}`. Set "
                f"`{other}={needed!r}`, or leave `{each.name}` out."
            )


def check_score_settings(config: Any) -> None:
    """Raise a ValueError if the settings of scores, or of answers without EOS, contradict each other."""
    score, penalty = config.missing_eos_score, config.missing_eos_penalty
    if score is not None and penalty is not None:
        raise ValueError(
            f"`missing_eos_score={score}` replaces the score, but `missing_eos_penalty={penalty}` is subtracted from "
            "it. Set only one of them."
        )
    if config.mask_truncated_completions and (score, penalty) != (None, None):
        raise ValueError(
            f"`mask_truncated_completions=True` leaves out responses without EOS, but `missing_eos_score={score}` and "
            f"`missing_eos_penalty={penalty}` score them. Set only one of the three."
        )
    if config.reward_clip_range and not config.reward_clip_range[0] < config.reward_clip_range[1]:
        raise ValueError(f"`reward_clip_range` must be (min, max) with min < max, got {config.reward_clip_range}.")
    if config.reward_normalization == "group" and not config.reward_group_column:
        raise ValueError("`reward_normalization='group'` needs `reward_group_column`, the dataset column to group by.")
