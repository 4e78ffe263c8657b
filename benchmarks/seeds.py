"""Share what studies of several seeds do: check the seeds, run each world, write means with intervals."""

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from scipy.stats import t as student

from recipes.demo.stages import DemoArguments, use_one_thread
from trl_ext import StrictTrlParser
from trl_ext.runs import setting


def check_grid(args: Any, *names: str) -> None:
    """Raise a `ValueError` if one of these arguments is an empty list, or holds a value twice."""
    for name in names:
        values = getattr(args, name)
        if not values or len(set(values)) < len(values):
            raise ValueError(f"`{name}` must be one or more different values, got {values}")


@dataclass
class SeededStudyArguments:
    """Declare the arguments that every study of several seeds has."""

    seeds: list[int] = field(
        default_factory=lambda: [0, 1, 2, 3, 4], metadata={"help": "Seeds of world and training."}
    )
    short: bool = setting(False, "Take the same way in minutes, too short to show anything.")

    def __post_init__(self):
        check_grid(self, "seeds")

    @property
    def worlds(self) -> str:
        """Return the folder of the worlds within `output_dir`; its name has the settings that the worlds depend on."""
        return f"planted-{self.planted_share:g}"  # type: ignore[attr-defined]


def in_words(values: Sequence[float]) -> str:
    """Return a mean with its 95 % t-interval over the seeds, as `+0.123 ± 0.045`."""
    if len(values) < 2:
        return f"{values[0]:+.3f}"
    half = student.ppf(0.975, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return f"{fmean(values):+.3f} ± {half:.3f}"


def write_results(rows: list[dict], table: str, output_dir: Path, name: str) -> None:
    """Write `name`.csv with a line for each row, and `name`.md with the table."""
    with (output_dir / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(column for row in rows for column in row)))
        writer.writeheader()
        writer.writerows(rows)
    (output_dir / f"{name}.md").write_text(table)


def run_study(
    kind: type[SeededStudyArguments],
    name: str,
    description: str,
    study: Callable[[Any, DemoArguments], list[dict]],
    table: Callable[[list[dict]], str],
    arguments: list[str] | None,
) -> None:
    """
    Run a study in the world of each seed, as the command `python -m recipes.demo.NAME`.

    The results are written after each seed, so what is interrupted has the seeds that were done.

    Args:
        kind: the class of the study's arguments.
        name: the study's module, which the files of its results are named after.
        description: shown by `--help`.
        study: makes all runs in one world, and returns a row for each.
        table: makes the table of all rows, in Markdown.
        arguments: the command line; None takes the process's own.
    """
    parser = StrictTrlParser(kind, prog=f"python -m recipes.demo.{name}", description=description)
    (args,) = parser.parse_args_and_config(arguments)
    use_one_thread()
    output_dir, rows = Path(args.output_dir), []
    for seed in args.seeds:
        demo = DemoArguments(seed, str(output_dir / args.worlds), planted_share=args.planted_share, short=args.short)
        with parser.one_line_errors(ValueError):
            rows += study(args, demo)
        write_results(rows, table(rows), output_dir, name)
    print(table(rows))
