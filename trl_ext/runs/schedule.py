"""Write the summary of a run, a few aligned lines that are printed when it begins."""

import math
import shutil
import textwrap
from typing import Any

from datasets import Dataset

from ..models.adapters import CRITIC, POLICY, REFERENCE
from ..models.weights import size_of

WIDTH = 100  # characters of a line, at most
_WHOLE_WORDS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}  # paths stay whole


def block(title: str, lines: dict[str, str]) -> str:
    """Return a title with named lines below it, wrapped and aligned; lines without a text are left out."""
    room, width = max(map(len, lines)) + 4, min(shutil.get_terminal_size((WIDTH, 24)).columns, WIDTH)
    shown = [
        textwrap.fill(f"  {name:{room - 2}}{text}", width, subsequent_indent=" " * room, **_WHOLE_WORDS)
        for name, text in lines.items()
        if text
    ]
    return "\n".join([title, *shown])


def schedule(trainer: Any, **own: str) -> str:
    """
    Return a summary of a run of SFT, reward modelling or DPO: its model, data, steps and checkpoints.

    `own` adds lines, a text by the name of the line.
    """
    args, model = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
    rows = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    evaluated = rows_of(trainer.eval_dataset).removesuffix(" rows").removesuffix(" row")
    return block(
        type(trainer).__name__.removeprefix("Resumable").removesuffix("Trainer"),
        {
            "model": sizes(model.named_parameters(), model),
            **own,
            "data": f"{rows_of(trainer.train_dataset)}{f', {evaluated} to evaluate on' if evaluated else ''}",
            "step": f"{count(rows, 'row')} = {portions(args)}",
            "total": _total(trainer),
            "saves": saves(args),
        },
    )


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def sizes(named: Any, model: Any) -> str:
    """
    Return a text with two numbers of weights: of all, and of those that are trained.

    The weights of other adapters than the policy's and the critic's, such as the reference's, do not count.
    """
    others = {*getattr(model, "peft_config", ())} - {POLICY, CRITIC}
    parameters = [parameter for name, parameter in named if others.isdisjoint(name.split("."))]
    every, trained = size_of(parameters), size_of(p for p in parameters if p.requires_grad)
    return f"{every:,} parameters, {'all' if every == trained else f'{trained:,}'} trained"


def reference_of(trainer: Any, model: Any) -> str:
    """Return a text that says what the reference model of a run is."""
    if trainer.ref_model is not None:
        return "frozen copy"
    return "frozen copy of the adapter" if REFERENCE in getattr(model, "peft_config", ()) else "the base, adapters off"


def rows_of(dataset: Any) -> str:
    if isinstance(dataset, dict):
        return " + ".join(f"{rows_of(part)} of {name}" for name, part in dataset.items())
    return "" if dataset is None else count(len(dataset), "row") if isinstance(dataset, Dataset) else "a stream"


def portions(args: Any) -> str:
    processes = "1 process" if args.world_size == 1 else f"{args.world_size} processes"
    return f"{args.train_batch_size} per device × {args.gradient_accumulation_steps} accumulated × {processes}"


def steps_of(trainer: Any) -> int | None:
    """Return the number of optimizer steps of a run, computed as transformers does; None for a stream without end."""
    args = trainer.args
    if args.max_steps > 0:
        return args.max_steps
    if not isinstance(trainer.train_dataset, Dataset):
        return None
    round_up_or_down = math.floor if args.dataloader_drop_last else math.ceil
    micro_batches = round_up_or_down(len(trainer.train_dataset) / (args.train_batch_size * args.world_size))
    return math.ceil(args.num_train_epochs * max(math.ceil(micro_batches / args.gradient_accumulation_steps), 1))


def saves(args: Any) -> str:
    """Return a text on checkpoints: when they are written, where, and how many are kept."""
    if args.save_strategy == "no":
        return f"no checkpoints, only the final model, in {args.output_dir}"
    when = {
        "steps": f"every {args.save_steps:g} steps" if args.save_steps >= 1 else f"every {args.save_steps:.0%}",
        "epoch": "every epoch",
    }.get(args.save_strategy, f"the best by {args.metric_for_best_model}")
    limit = args.save_total_limit
    kept = ", the newest is kept" if limit == 1 else f", the newest {limit} are kept" if limit else ""
    return f"{when} in {args.output_dir}{kept}"


def _total(trainer: Any) -> str:
    args, steps = trainer.args, steps_of(trainer)
    if steps is None:
        return "as long as the stream lasts"
    epochs = f"{args.num_train_epochs:g} {'epoch' if args.num_train_epochs == 1 else 'epochs'} = "
    return f"{'' if args.max_steps > 0 else epochs}{count(steps, 'optimizer step')}"
