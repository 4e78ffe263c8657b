"""Check the values of a configuration: ranges, choices, and settings that are read only where another one is set."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral
from typing import Any, Literal, get_args, get_origin, get_type_hints


@dataclass
class SavingSettings:
    """
    Mixin of `TrainingArguments` that our trainers read: what a run writes, and how.

    Args:
        save_in_background: write checkpoints while training goes on, from a copy in memory that is kept for the next
            one. At most one is being written. `train` returns when the last one is complete.
        on_save_failure: what follows if a checkpoint could not be written, for want of space, say. `"stop"` ends the
            run, with one sentence; `"continue"` says it and goes on. What was written of it is removed.
        record_run: write what the run logs, with PPO some of its completions, too, and the page `report.html` when it
            ends, into `output_dir`. What cannot be written is a warning.
    """

    save_in_background: bool = field(default=False, metadata={"help": "Write checkpoints while training goes on."})
    on_save_failure: Literal["stop", "continue"] = field(
        default="stop", metadata={"help": "What follows if a checkpoint could not be written."}
    )
    record_run: bool = field(default=True, metadata={"help": "Write metrics and a page of the run."})

    def __post_init__(self):
        super().__post_init__()  # type: ignore[misc]
        check_settings(self, {}, {})


def resolve_bf16(config: Any) -> None:
    """
    Set `bf16` where it is left open: off on a CPU, and on a GPU as TRL does, on unless `fp16` is set.

    Raises:
        ValueError: it is asked for, there is no GPU, and nobody has said that a CPU will do; or `fp16` on a CPU.
    """
    import torch  # here: what was mistyped is refused before it

    no_gpu = not torch.accelerator.is_available()
    if config.fp16 and (no_gpu or config.use_cpu):
        raise ValueError("`fp16=True` does nothing on a CPU: leave it out to train in float32, or use a GPU.")
    if config.bf16 is None:
        config.bf16 = not (config.fp16 or config.use_cpu or no_gpu)
    elif config.bf16 and no_gpu and not config.use_cpu:
        raise ValueError(
            "`bf16=True`, but there is no GPU: set `bf16=False` to train on the CPU in float32, or `use_cpu=True` if "
            "you do want bfloat16 there."
        )


def resolve_checkpointing(config: Any) -> None:
    """Give `activation_checkpointing` what TRL's default, or a script, gives its old name, which has a warning."""
    for end in ("checkpointing", "checkpointing_kwargs"):
        if getattr(config, f"activation_{end}") is None:
            setattr(config, f"activation_{end}", getattr(config, f"gradient_{end}"))


def check_settings(
    config: Any,
    ranges: Mapping[str, tuple[str, Callable[[Any], bool]]],
    only_with: Mapping[str, tuple[str, Any]],
) -> None:
    """
    Raise for the first field whose value cannot work.

    Args:
        config: a dataclass instance; its `Literal` fields must have one of their values, or `None` if that is allowed,
            and so must those of whole numbers and those with a range.
        ranges: field → (rule in words, test of a value that is not `None`).
        only_with: field → (other field, value that it must have), for a field that does nothing otherwise.

    Raises:
        ValueError: with the field, its value, and what to do.
    """
    hints = get_type_hints(type(config))  # not `field.type`: HfArgumentParser overwrites it
    for name, hint in hints.items():
        value = getattr(config, name)
        if hint not in (int, int | None) or (value is None and hint is not int):
            continue
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise ValueError(f"`{name}` must be a whole number, got {value!r}.")
    for name, (rule, is_valid) in ranges.items():
        value = getattr(config, name)
        try:
            is_wrong = hints[name] is float if value is None else not is_valid(value)
        except TypeError:  # text, or one number for several
            is_wrong = True
        if is_wrong:
            raise ValueError(f"`{name}` must be {rule}, got {value!r}.")
    for name, hint in hints.items():
        literal = next((t for t in (hint, *get_args(hint)) if get_origin(t) is Literal), None)
        choices = [*get_args(literal), *([None] if literal is not hint else [])]
        if literal and getattr(config, name) not in choices:
            raise ValueError(f"`{name}` must be one of {list(get_args(literal))}, got {getattr(config, name)!r}.")
    defaults = {f.name: f.default for f in fields(config)}
    for name, (setting, needed) in only_with.items():
        value, found = getattr(config, name), getattr(config, setting)
        if found != needed and value != defaults[name]:
            raise ValueError(
                f"`{name}={value}` is for `{setting}={needed!r}`, but `{setting}={found!r}`: set that, or leave it "
                "out."
            )


def check_score_settings(args: Any) -> None:
    """Raise if what happens to scores, and to answers without EOS, contradicts itself."""
    if args.missing_eos_score is not None and args.missing_eos_penalty is not None:
        raise ValueError(
            f"`missing_eos_score={args.missing_eos_score}` replaces the score that `missing_eos_penalty="
            f"{args.missing_eos_penalty}` is subtracted from: set one of them."
        )
    if args.mask_truncated_completions and (args.missing_eos_score, args.missing_eos_penalty) != (None, None):
        raise ValueError(
            "`mask_truncated_completions=True` leaves out the responses without EOS, which `missing_eos_score="
            f"{args.missing_eos_score}` and `missing_eos_penalty={args.missing_eos_penalty}` are for: set one of them."
        )
    if args.reward_clip_range and not args.reward_clip_range[0] < args.reward_clip_range[1]:
        raise ValueError(f"`reward_clip_range` must be (min, max) with min < max, got {args.reward_clip_range}.")
