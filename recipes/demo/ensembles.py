"""Test whether an ensemble of reward models withstands noisy labels: PPO with one model, and with four combined.

    python -m recipes.demo.ensembles --seeds 0 1 2 3 4 --kl_coefs 0 0.05

In each world a share of the training pairs is flipped. The single reward model sees all of them; each of the four
members leaves out another quarter, and has another seed. PPO trains on the single model, and on the members' mean,
minimum (worst case) and mean − standard deviation (uncertainty-weighted; Coste et al., 2310.02743). Writes
`ensembles.csv`, a row a run, and `ensembles.md`; the same command again goes on, also with more seeds.
"""

if __name__ == "__main__":  # before the libraries that are imported next
    from trl_ext.upstream import quiet

    quiet()

import itertools
import json
import random
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from trl_ext.runs import setting

from .report import read_curve
from .seeds import SeededStudyArguments, check_grid, in_words, run_study
from .stages import STUDIED, DemoArguments, noisy_reward_stage, ppo_stage

MEMBERS = 4
COMBINED = {"mean": "mean", "WCO": "min", "UWO": "uncertainty"}


@dataclass
class EnsembleStudyArguments(SeededStudyArguments):
    """Declare the grid: each KL coefficient and seed is trained with each kind of reward."""

    kl_coefs: list[float] = field(default_factory=lambda: [0.0], metadata={"help": "Fixed KL coefficients."})
    flipped_share: float = setting(0.25, "Share of the training pairs that are flipped.")
    planted_share: float = setting(0.0, "Share of chosen answers that get the phrase.")
    output_dir: str = setting("outputs/ensembles", "Folder of all runs.")

    @property
    def worlds(self) -> str:
        return f"{super().worlds}-flipped-{self.flipped_share:g}"

    def __post_init__(self):
        super().__post_init__()
        check_grid(self, "kl_coefs")
        if min(self.kl_coefs) < 0 or not 0 <= self.flipped_share <= 0.5:
            raise ValueError(
                f"`kl_coefs` must be >= 0, `flipped_share` in [0, 0.5]; got {self.kl_coefs} and {self.flipped_share}"
            )


def flipped(rows: list[dict], share: float, seed: int, left_out: int | None = None) -> list[dict]:
    """Return the pairs with a share of them the wrong way round, without every fourth from `left_out` on."""
    draw = random.Random(f"{seed} flipped")
    wrong = set(draw.sample(range(len(rows)), round(share * len(rows))))
    rows = [
        {**row, "chosen": row["rejected"], "rejected": row["chosen"]} if i in wrong else row
        for i, row in enumerate(rows)
    ]
    return rows if left_out is None else [row for i, row in enumerate(rows) if i % MEMBERS != left_out]


def reward_models(args: EnsembleStudyArguments, demo: DemoArguments) -> tuple[Path, list[Path]]:
    """Train the single model and the members of a world."""
    models = []
    for left_out in (None, *range(MEMBERS)):
        suffix, seed = ("single", demo.seed) if left_out is None else (f"member-{left_out}", 100 + left_out)
        rows = partial(flipped, share=args.flipped_share, seed=demo.seed, left_out=left_out)
        models.append(noisy_reward_stage(demo, f"reward-{suffix}", ["--seed", seed], rows))
    return models[0], models[1:]


def rewards(single: Path, members: list[Path]) -> dict[str, dict]:
    """Return the kinds of reward that PPO trains on, by name, as `rewards:` has them in YAML."""
    paths = [str(path) for path in members]
    return {
        "single": {"ModelReward": {"model": str(single)}},
        **{name: {"EnsembleReward": {"members": paths, "combine": how}} for name, how in COMBINED.items()},
    }


def measured(folder: Path) -> dict[str, float]:
    """Return gold on the held-out prompts before training, at its peak and at the end; proxy and KL at the end."""
    curve = read_curve(folder)
    return {
        "gold_sft": curve["gold"][0].item(),
        "gold_peak": curve["gold"].max().item(),
        "gold_end": curve["gold"][-1].item(),
        "proxy_end": curve["proxy"][-1].item(),
        "kl_end": curve["kl"][-1].item(),
    }


def table(rows: list[dict]) -> str:
    """Return a table of means over the seeds, with the differences from the single model in the same world."""
    lines = ["| KL coefficient | reward | gold − SFT's | at its peak | gold − single's | KL, nats | seeds |"]
    lines.append("|---|---|---|---|---|---|---|")
    singles = {(row["kl_coef"], row["seed"]): row for row in rows if row["reward"] == "single"}
    for kl_coef, name in dict.fromkeys((row["kl_coef"], row["reward"]) for row in rows):
        cells = [row for row in rows if (row["kl_coef"], row["reward"]) == (kl_coef, name)]
        end = in_words([row["gold_end"] - row["gold_sft"] for row in cells])
        peak = in_words([row["gold_peak"] - row["gold_sft"] for row in cells])
        gain = in_words([row["gold_end"] - singles[kl_coef, row["seed"]]["gold_end"] for row in cells])
        kl = in_words([row["kl_end"] for row in cells])
        lines.append(f"| {kl_coef:g} | {name} | {end} | {peak} | {gain} | {kl} | {len(cells)} |")
    return "\n".join(lines) + "\n"


def study(args: EnsembleStudyArguments, demo: DemoArguments) -> list[dict]:
    """Train PPO on each kind of reward with each KL coefficient in one world; return a row for each run."""
    single, members = reward_models(args, demo)
    rows = []
    for kl_coef, (name, reward) in itertools.product(args.kl_coefs, rewards(single, members).items()):
        proxy = ["--rewards", json.dumps(reward), "--reward_weights", 0, 0, 1]
        run = ppo_stage(demo, f"unguarded-{name}-{kl_coef:g}", [*STUDIED, "--kl_coef", kl_coef], proxy)
        rows.append({"kl_coef": kl_coef, "seed": demo.seed, "reward": name, **measured(run)})
        print(rows[-1], flush=True)
    return rows


def main(arguments: list[str] | None = None) -> None:
    run_study(EnsembleStudyArguments, "ensembles", __doc__, study, table, arguments)


if __name__ == "__main__":
    main()
