"""Measure what pre-training the critic brings to PPO: explained variance, episodes until a target score, gold.

    python -m recipes.demo.pretraining --seeds 0 1 2 3 4 --lams 0.95 0.8

In each world the SFT model answers the training prompts, the reward model scores the answers, and two critics are
trained on them before PPO: from the SFT model with a zero head, and from the reward model. Guarded PPO then runs with
each, and with what each started from; all else is equal. The targets of a pair of runs are half and 80 % of the way
from the start to where the run without pre-training ends, in the reward model's score on held-out prompts, which is
measured after every rollout; `episodes_until` says how.

The advantages' λ says how much of a token's credit the critic must find: λ^n of it comes from the score n tokens on.
guarded.yaml has 0.95, so 0.3 of the score reaches the first of the demo's 24 tokens. In an answer of hundreds of
tokens nothing does, as with 0.8 here. Another λ comes with `lam_value: 1`, as in VC-PPO.

Writes `pretraining.csv`, a row a run, and `pretraining.md`; the same command again goes on, also with more seeds.
"""

if __name__ == "__main__":  # before the libraries that are imported next
    from trl_ext.upstream import quiet

    quiet()

import itertools
import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from trl_ext.ppo import load_critic
from trl_ext.runs import setting

from .report import read_curve
from .seeds import SeededStudyArguments, check_grid, in_words, run_study
from .stages import (
    STUDIED,
    DemoArguments,
    build,
    critic_stage,
    ppo_stage,
    reward_stage,
    rollouts_stage,
    sft_stage,
)

# Run: the run without pre-training that it is compared with
WITHOUT = {"zero": None, "pretrained-zero": "zero", "reward": None, "pretrained-reward": "reward"}
SHARES = (0.5, 0.8)  # of the gain of the run without: its targets
LAM = 0.95  # guarded.yaml's
EPISODES = 128  # of a rollout
LAST = 4  # measurements whose mean is where a run ends
WIDTH = 3  # measurements of a moving mean


@dataclass
class PretrainingStudyArguments(SeededStudyArguments):
    """Declare the worlds, and how the critics are trained."""

    num_samples: int = setting(4, "Answers to each of the 4,000 training prompts.")
    num_train_epochs: int = setting(4, "Passes over them.")
    lams: list[float] = field(default_factory=lambda: [LAM, 0.8], metadata={"help": "λ of the advantages."})
    planted_share: float = setting(0.2, "Share of chosen answers that get the phrase.")
    output_dir: str = setting("outputs/pretraining", "Folder of all runs.")

    def __post_init__(self):
        super().__post_init__()
        check_grid(self, "lams")


def smoothed(scores: Tensor) -> Tensor:
    """Return the moving mean of (N,) measurements: each with its neighbours on both sides, as far as there are any."""
    half = WIDTH // 2
    return torch.stack([scores[max(i - half, 0) : i + half + 1].mean() for i in range(len(scores))])


def episodes_until(scores: Tensor, target: float, step: int = EPISODES) -> float:
    """
    Return the episodes until the moving mean of held-out scores first reaches a target, interpolated linearly.

    Args:
        scores: (N,), measured before training and after every `step` episodes.
        target: score.

    Returns:
        Episodes; infinity if it never does.
    """
    curve = smoothed(scores)
    reached = (curve >= target).nonzero()
    if not len(reached):
        return float("inf")
    after = int(reached[0])
    if after == 0:
        return 0.0
    low, high = curve[after - 1].item(), curve[after].item()
    return step * (after - 1 + (target - low) / (high - low))


def needed(curve: dict[str, Tensor], without: dict[str, Tensor], step: int) -> dict[str, float]:
    """
    Return the targets, the episodes until a run reaches each, and their ratio to the run that it is compared with.

    Args:
        curve, without: measurements of the run, and of the run that it is compared with.
        step: episodes from one measurement to the next.
    """
    start, end = without["proxy"][0], without["proxy"][-LAST:].mean()
    result = {}
    for share in SHARES:
        target = (start + share * (end - start)).item()
        episodes, whole = (episodes_until(each["proxy"], target, step) for each in (curve, without))
        ratio = episodes / whole if whole else math.nan  # the run that it is compared with began at the target
        result |= {f"target_{share:g}": target, f"episodes_{share:g}": episodes, f"ratio_{share:g}": ratio}
    return result


def logged(folder: Path, key: str) -> list[float]:
    """Return the values that a run has logged under a key, in order."""
    logs = [json.loads(line).get("logs", {}) for line in (folder / "metrics.rank0.jsonl").read_text().splitlines()]
    return [log[key] for log in logs if key in log]


def study(args: PretrainingStudyArguments, demo: DemoArguments) -> list[dict]:
    """Make all runs in one world; return a row for each run."""
    policy, reward = sft_stage(demo), reward_stage(demo)
    rollouts = rollouts_stage(demo, args.num_samples)

    def zero_head(folder: Path) -> None:
        load_critic(str(policy))[0].save_pretrained(folder)

    build(demo.folder / "critic-zero", {"seed": demo.seed}, zero_head)
    options = ["--num_train_epochs", args.num_train_epochs]
    critics = {
        "zero": critic_stage(demo, "pretrain_critic-zero", policy, rollouts, options),
        "reward": critic_stage(demo, "pretrain_critic-reward", reward, rollouts, options),
    }
    starts = {"zero": demo.folder / "critic-zero", "reward": reward}
    starts |= {f"pretrained-{name}": critic for name, critic in critics.items()}
    rows = []
    for lam in args.lams:
        curves = {}
        for name, without in WITHOUT.items():
            more = [*STUDIED, "--value_model_name_or_path", starts[name], "--eval_steps", 8]
            more += [] if lam == LAM else ["--lam", lam, "--lam_value", 1]
            run = ppo_stage(demo, f"guarded-{name}" + ("" if lam == LAM else f"-lam-{lam:g}"), more)
            curve = curves[name] = read_curve(run)
            measured = max(len(curve["proxy"]) - 1, 1)
            step = int(curve["step"][-1]) * EPISODES // 8 // measured  # 8 optimizer steps a rollout
            of_returns = logged(critics[name.split("-")[-1]], "eval_val/explained_variance")
            rows.append(
                {
                    "seed": demo.seed,
                    "lam": lam,
                    "run": name,
                    "first_explained_variance": logged(run, "val/explained_variance")[0],  # of PPO's returns
                    "held_out_explained_variance": of_returns[-1 if without else 0],  # Monte Carlo
                    **needed(curve, curves[without or name], step),
                    "proxy_end": curve["proxy"][-LAST:].mean().item(),
                    "gold_sft": curve["gold"][0].item(),
                    "gold_end": curve["gold"][-LAST:].mean().item(),
                    "kl_end": curve["kl"][-LAST:].mean().item(),
                }
            )
            print(rows[-1], flush=True)
    return rows


def table(rows: list[dict]) -> str:
    """Return a table of means with 95 % t-intervals over the seeds, and of gold's gain by pre-training."""
    heads = ["λ", "critic starts from", "explained variance, first rollout", "of Monte Carlo returns, held out"]
    for share in SHARES:
        heads += [f"episodes until {share:.0%} of the gain", "÷ without"]
    heads += ["gold at the end", "− without", "seeds"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    ends = {(row["seed"], row["lam"], row["run"]): row["gold_end"] for row in rows}
    for lam, (name, without) in itertools.product(dict.fromkeys(row["lam"] for row in rows), WITHOUT.items()):
        cells = [row for row in rows if (row["lam"], row["run"]) == (lam, name)]
        shown = [in_words([row[f"{kind}_explained_variance"] for row in cells]) for kind in ("first", "held_out")]
        for share in SHARES:
            episodes, ratios = ([row[f"{kind}_{share:g}"] for row in cells] for kind in ("episodes", "ratio"))
            shown += [in_words(episodes), in_words(ratios) if without else "1"]
        gain = [row["gold_end"] - ends[row["seed"], lam, without] for row in cells] if without else None
        shown += [in_words([row["gold_end"] for row in cells]), in_words(gain) if gain else "0"]
        lines.append(f"| {lam:g} | {name} | {' | '.join(shown)} | {len(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    run_study(PretrainingStudyArguments, "pretraining", __doc__, study, table, arguments)


if __name__ == "__main__":
    main()
