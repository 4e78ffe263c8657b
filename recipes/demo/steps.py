"""Measure how many episodes guarded PPO needs, by clip range, learning rate, baseline and the size of its rollouts.

    python -m recipes.demo.steps --seeds 0 1 2

All arms train the SFT model of the seed's world with guarded.yaml's KL controller, which holds the KL to 1.5 nats, for
4,096 episodes. The targets are half and 80 % of the way from the start to where the first arm ends, in the reward
model's score on held-out prompts, which is measured after every 128 episodes. Writes `steps.csv`, a row a run, and
`steps.md`; the same command again goes on, also with more seeds.
"""

if __name__ == "__main__":  # before the libraries that are imported next
    from trl_ext.upstream import quiet

    quiet()

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trl_ext.runs import setting

from .pretraining import EPISODES, LAST, SHARES, needed
from .report import read_curve
from .seeds import SeededStudyArguments, in_words, run_study
from .stages import STUDIED, DemoArguments, ppo_stage

FIRST = "rate 1.5e-4, warm-up, rollouts of 128"
SHIPPED = "guarded.yaml: rate × 4/3, no warm-up, rollouts of 64, gated"
FASTER = {"learning_rate": 3e-4, "warmup_steps": 0}
SMALLER = {"per_device_train_batch_size": 32, "eval_steps": 16}  # rollouts of 64, measured after every second one
# Arm: what differs from STUDIED. A pass over a rollout is two optimizer steps, each on half of it
ARMS: dict[str, dict[str, Any]] = {
    FIRST: {},
    "clip 0.4": {"cliprange": 0.4},
    "rate × 2, no warm-up": FASTER,
    "rollouts of 64": SMALLER,
    "both": FASTER | SMALLER,
    "both, clip 0.4": FASTER | SMALLER | {"cliprange": 0.4},
    "gated": {"baseline": "gated"},
    "both, gated": FASTER | SMALLER | {"baseline": "gated"},
    SHIPPED: {"learning_rate": 2e-4, "warmup_steps": 0, "baseline": "gated"} | SMALLER,
}


@dataclass
class StepsStudyArguments(SeededStudyArguments):
    """Declare the worlds."""

    planted_share: float = setting(0.2, "Share of chosen answers that get the phrase.")
    output_dir: str = setting("outputs/steps", "Folder of all runs.")


def study(args: StepsStudyArguments, demo: DemoArguments) -> list[dict]:
    """Make all runs in one world; return a row for each run."""
    rows: list[dict[str, Any]] = []
    first: dict[str, Tensor] = {}
    for number, (arm, changed) in enumerate(ARMS.items()):
        flags = [part for name, value in ({"eval_steps": 8} | changed).items() for part in (f"--{name}", value)]
        curve = read_curve(ppo_stage(demo, f"guarded-steps-{number}", [*STUDIED, *flags]))
        first = first or curve
        row: dict[str, Any] = {"seed": demo.seed, "run": arm, **needed(curve, first, EPISODES)}
        row |= {f"{name}_end": curve[name][-LAST:].mean().item() for name in ("proxy", "gold", "kl")}
        rows.append(row | {"kl_most": curve["kl"].max().item()})
        print(rows[-1], flush=True)
    return rows


def table(rows: list[dict]) -> str:
    """Return a table of means with 95 % t-intervals over the seeds."""
    heads = ["guarded PPO"]
    for share in SHARES:
        heads += [f"episodes until {share:.0%} of the gain", "÷ the first row"]
    heads += ["score at the end", "gold", "KL, nats", "highest KL", "seeds"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    keys = [f"{kind}_{share:g}" for share in SHARES for kind in ("episodes", "ratio")]
    keys += ["proxy_end", "gold_end", "kl_end", "kl_most"]
    for arm in dict.fromkeys(row["run"] for row in rows):
        cells = [row for row in rows if row["run"] == arm]
        shown = [in_words([row[key] for row in cells]) for key in keys]
        lines.append(f"| {arm} | {' | '.join(shown)} | {len(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    run_study(StepsStudyArguments, "steps", __doc__, study, table, arguments)


if __name__ == "__main__":
    main()
