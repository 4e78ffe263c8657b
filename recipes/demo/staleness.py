"""Measure what old weights cost PPO: gold, proxy and KL where rollouts are drawn 0, 1, 2 or 4 rollouts ahead.

    python -m recipes.demo.staleness --seeds 0 1 2 3 4 --rollouts_ahead 0 1 2 4

Each run is `unguarded.yaml` with the studies' settings (`STUDIED`) and a fixed KL coefficient, in the demo's world of
its seed. Rollouts are drawn ahead by a second process on the CPU, and corrected by `importance_sampling_mode`; with 0
they are drawn by the policy that is trained. Writes `staleness.csv`, a row a run, and `staleness.md`; the same command
again goes on, also with more seeds. Hardware: 2 CPU cores, some two minutes a run.
"""

if __name__ == "__main__":  # before the libraries that are imported next
    from trl_ext.upstream import quiet

    quiet()

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from trl_ext.runs import setting

from .report import read_curve
from .seeds import SeededStudyArguments, check_grid, in_words, run_study
from .stages import STUDIED, DemoArguments, ppo_stage


@dataclass
class StalenessStudyArguments(SeededStudyArguments):
    """Declare the grid: each seed is trained with each number of rollouts ahead, and each correction."""

    rollouts_ahead: list[int] = field(
        default_factory=lambda: [0, 1, 2, 4], metadata={"help": "Rollouts ahead, 0 among them."}
    )
    corrections: list[str] = field(
        default_factory=lambda: ["auto"],
        metadata={"help": "`importance_sampling_mode` of the runs that are ahead, `none` for no correction."},
    )
    kl_coef: float = setting(0.05, "Fixed KL coefficient.")
    total_episodes: int = setting(2048, "Episodes of a run; a rollout has 128.")
    planted_share: float = setting(0.0, "Share of chosen answers that get the phrase.")
    output_dir: str = setting("outputs/staleness", "Folder of all runs.")

    def __post_init__(self):
        super().__post_init__()
        check_grid(self, "rollouts_ahead", "corrections")
        if 0 not in self.rollouts_ahead or min(self.rollouts_ahead) < 0:
            raise ValueError(f"`rollouts_ahead` must be 0 or more, and include 0; got {self.rollouts_ahead}")


def measured(folder: Path) -> dict[str, float]:
    """Return gold, proxy and KL on the held-out prompts at the end, and the rollouts' staleness in the last half."""
    curve = read_curve(folder)
    checkpoint = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    logs = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    last = logs[-1]["step"]

    def mean(name: str) -> float:
        values = [log[name] for log in logs if name in log and log["step"] > last / 2]
        return fmean(values) if values else math.nan

    return {
        "gold_sft": curve["gold"][0].item(),
        "gold": curve["gold"][-1].item(),
        "proxy_sft": curve["proxy"][0].item(),
        "proxy": curve["proxy"][-1].item(),
        "kl": curve["kl"][-1].item(),
        "staleness": mean("sampling/staleness"),
        "sampling_kl": mean("sampling/kl"),
        "clipfrac": mean("policy/clipfrac_avg"),
    }


def table(rows: list[dict]) -> str:
    """Return a table of means with 95 % t-intervals over the seeds, and of differences from none ahead."""
    lines = [
        "| rollouts ahead | correction | gold − SFT's | gold − 0 ahead's | proxy − SFT's | KL to SFT, nats | "
        "KL(sampler ‖ policy), nats a token | clipped | seeds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    on_policy = {row["seed"]: row for row in rows if row["rollouts_ahead"] == 0}
    for ahead, correction in dict.fromkeys((row["rollouts_ahead"], row["correction"]) for row in rows):
        cells = [row for row in rows if (row["rollouts_ahead"], row["correction"]) == (ahead, correction)]
        columns = [
            [row["gold"] - row["gold_sft"] for row in cells],
            [row["gold"] - on_policy[row["seed"]]["gold"] for row in cells],
            [row["proxy"] - row["proxy_sft"] for row in cells],
            [row["kl"] for row in cells],
            [row["sampling_kl"] for row in cells],
            [row["clipfrac"] for row in cells],
        ]
        values = " | ".join(in_words(column) for column in columns)
        lines.append(f"| {ahead} | {correction} | {values} | {len(cells)} |")
    return "\n".join(lines) + "\n"


def study(args: StalenessStudyArguments, demo: DemoArguments) -> list[dict]:
    """Train with each number of rollouts ahead and each correction in one world; return a row for each run."""
    rows = []
    for ahead in sorted(args.rollouts_ahead):
        for correction in args.corrections if ahead else ["none"]:
            options = [*STUDIED, "--total_episodes", args.total_episodes, "--eval_steps", 64]
            options += ["--kl_coef", args.kl_coef, "--rollouts_ahead", ahead]
            options += ["--importance_sampling_mode", correction] if ahead else []
            run = ppo_stage(demo, f"unguarded-ahead-{ahead}-{correction}", options)
            rows.append({"seed": demo.seed, "rollouts_ahead": ahead, "correction": correction, **measured(run)})
            print(rows[-1], flush=True)
    return rows


def main(arguments: list[str] | None = None) -> None:
    run_study(StalenessStudyArguments, "staleness", __doc__, study, table, arguments)


if __name__ == "__main__":
    main()
