"""What studies of several seeds share: their grid is checked, and their means have intervals."""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from trl_ext.runs import setting

# Student's t at 97.5 %, for 2 to 10 seeds
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def check_grid(args: Any, *names: str) -> None:
    """Raise if one of these arguments does not hold different values."""
    for name in names:
        values = getattr(args, name)
        if not values or len(set(values)) < len(values):
            raise ValueError(f"`{name}` must be one or more different values, got {values}")


@dataclass
class SeededStudyArguments:
    """What each study of several seeds asks for."""

    seeds: list[int] = field(
        default_factory=lambda: [0, 1, 2, 3, 4], metadata={"help": "Seeds of world and training."}
    )
    short: bool = setting(False, "Take the same way in minutes, and show nothing.")

    def __post_init__(self):
        check_grid(self, "seeds")
        if len(self.seeds) > len(STUDENT) + 1:
            raise ValueError(f"`seeds` must be {len(STUDENT) + 1} or fewer, got {len(self.seeds)}")


def in_words(values: Sequence[float]) -> str:
    """A mean with its 95 % t-interval over the seeds."""
    if len(values) < 2:
        return f"{values[0]:+.3f}"
    half = STUDENT[len(values) - 2] * stdev(values) / math.sqrt(len(values))
    return f"{fmean(values):+.3f} ± {half:.3f}"


def write_results(rows: list[dict], table: str, output_dir: Path, name: str) -> None:
    """Write `name`.csv, a row a run, and `name`.md."""
    with (output_dir / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(column for row in rows for column in row)))
        writer.writeheader()
        writer.writerows(rows)
    (output_dir / f"{name}.md").write_text(table)
