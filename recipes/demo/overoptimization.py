"""Measure how far a reward model can be trusted: gold and proxy reward over the distance from SFT.

    python -m recipes.demo.overoptimization --kl_coefs 0 0.05 0.2 --seeds 0 1 --planted_shares 0 0.2

Trains a policy for each KL coefficient, seed, planted share and label noise, and writes `overoptimization.csv`, a row
a measurement with its run's fitted d(α − β log d), and `overoptimization.png` (Gao et al., 2210.10760). A cell of the
grid takes some minutes; the same command again goes on where it stopped, also with a larger grid.
"""

if __name__ == "__main__":  # before the libraries that are imported next
    from trl_ext.upstream import quiet

    quiet()

import csv
import itertools
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from trl_ext import StrictTrlParser
from trl_ext.evaluation import fit_overoptimization, overoptimization_curve
from trl_ext.runs import setting, whole_file

from .report import read_curve
from .seeds import check_grid
from .stages import STUDIED, DemoArguments, ppo_stage, use_one_thread

KINDS = ("gold", "proxy")


@dataclass
class StudyArguments:
    """Declare the grid: each combination is a run."""

    kl_coefs: list[float] = field(
        default_factory=lambda: [0.0, 0.05, 0.2], metadata={"help": "Fixed KL coefficients; raw scores as reward."}
    )
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2], metadata={"help": "Seeds of world and training."})
    planted_shares: list[float] = field(
        default_factory=lambda: [0.0, 0.2], metadata={"help": "Shares of chosen answers that get the phrase."}
    )
    label_noises: list[float] = field(
        default_factory=lambda: [0.1], metadata={"help": "How often the middle annotator slips."}
    )
    output_dir: str = setting("outputs/overoptimization", "Folder of all runs.")
    short: bool = setting(False, "Take the same way in minutes, and show nothing.")

    def __post_init__(self):
        check_grid(self, "kl_coefs", "seeds", "planted_shares", "label_noises")
        if min(self.kl_coefs) < 0:
            raise ValueError(f"`kl_coefs` must be >= 0, got {self.kl_coefs}")


@dataclass
class Run:
    """Hold one run of the grid, measured on the held-out prompts during training."""

    planted_share: float
    label_noise: float
    kl_coef: float
    seed: int
    curve: dict[str, Tensor]

    def gains(self, kind: str) -> tuple[Tensor, Tensor]:
        """Return √KL, and the reward's gain over SFT."""
        return self.curve["kl"].clamp(min=0).sqrt(), self.curve[kind] - self.curve[kind][0]


def write_csv(runs: list[Run], path: Path) -> None:
    """Write a row for each measurement, with α and β fitted to its run."""
    coefficients = [f"{kind}_{name}" for kind in KINDS for name in ("alpha", "beta")]
    names = ("planted_share", "label_noise", "kl_coef", "seed")
    with whole_file(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*names, "step", "kl", *KINDS, *coefficients])
        for run in runs:
            fits = [value for kind in KINDS for value in fit_overoptimization(*run.gains(kind))]
            for values in zip(*(run.curve[name].tolist() for name in ("step", "kl", *KINDS)), strict=True):
                writer.writerow([*(getattr(run, name) for name in names), *values, *fits])


def plot(runs: list[Run], path: Path) -> None:
    """Draw all seeds' points and the curve fitted to them, by world (columns) and KL coefficient (colours)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    worlds = sorted({(run.planted_share, run.label_noise) for run in runs})
    kl_coefs = sorted({run.kl_coef for run in runs})
    size = (1 + 4 * len(worlds), 7)
    figure, panels = plt.subplots(2, len(worlds), figsize=size, squeeze=False, sharey="row", layout="constrained")
    for (row, kind), (column, world) in itertools.product(enumerate(KINDS), enumerate(worlds)):
        axes = panels[row, column]
        for index, kl_coef in enumerate(kl_coefs):
            cells = [r for r in runs if (r.planted_share, r.label_noise) == world and r.kl_coef == kl_coef]
            if not cells:
                continue  # not trained yet
            distance, gain = (torch.cat(parts) for parts in zip(*(cell.gains(kind) for cell in cells), strict=True))
            alpha, beta = fit_overoptimization(distance, gain)
            grid = torch.linspace(0, distance.max().item(), 200, dtype=torch.double)
            axes.plot(distance, gain, ".", color=f"C{index}", alpha=0.5)
            label = f"kl_coef {kl_coef:g}: α {alpha:.2f}, β {beta:.2f}"
            axes.plot(grid, overoptimization_curve(grid, alpha, beta), color=f"C{index}", label=label)
        axes.set(xlabel="√KL to SFT, √nats", ylabel=f"{kind}: gain over SFT")
        axes.set_title(f"planted share {world[0]:g}, label noise {world[1]:g}")
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = StrictTrlParser(StudyArguments, prog="python -m recipes.demo.overoptimization", description=__doc__)
    (args,) = parser.parse_args_and_config(arguments)
    use_one_thread()
    output_dir, runs = Path(args.output_dir), []
    grid = list(itertools.product(args.planted_shares, args.label_noises, args.seeds, args.kl_coefs))
    for number, (share, noise, seed, kl_coef) in enumerate(grid, 1):
        print(
            f"[{number}/{len(grid)}] planted {share:g}, noise {noise:g}, seed {seed}, kl_coef {kl_coef:g}", flush=True
        )
        with parser.one_line_errors(ValueError):
            folder = str(output_dir / f"planted-{share:g}-noise-{noise:g}")
            demo = DemoArguments(seed, folder, planted_share=share, label_noise=noise, short=args.short)
            run = ppo_stage(demo, f"unguarded-{kl_coef:g}", [*STUDIED, "--kl_coef", kl_coef])
        runs.append(Run(share, noise, kl_coef, seed, read_curve(run)))
        write_csv(runs, output_dir / "overoptimization.csv")
        plot(runs, output_dir / "overoptimization.png")
    print(f"{output_dir / 'overoptimization.csv'}, {output_dir / 'overoptimization.png'}")


if __name__ == "__main__":
    main()
