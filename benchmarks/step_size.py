"""
How much the learning rate to begin with matters, where it stays and where it follows the KL of the updates.

    python -m benchmarks.step_size --cells short "own start" --arms fixed default --seeds 3

The worlds of `benchmarks.critic`, whose best score is known. A run's area is the mean share of the gain from the
model's first score to the best, over the tokens. *Tuned* is the fixed rate with the best mean area, at one minibatch
and four passes; rates are given as multiples of one near it. A row is written to `--out` as soon as it is known, and
the same command goes on from there.
"""

import argparse
import json
import math
import multiprocessing
import os
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor

from benchmarks.critic.study import CELLS, area, interval, reached, train
from benchmarks.critic.worlds import start_of
from trl_ext import PPOConfig
from trl_ext.functional import step_kl_sums

FACTORS = (1 / 30, 1 / 10, 1 / 3, 1, 3, 10, 30)
TUNED = {"own start": 1e-3, "turns": 1e-3, "noisy": 3e-3, "long": 3e-3, "dense": 3e-3, "short": 3e-3}
ARMS: dict[str, dict[str, Any]] = {
    "fixed": {"step_kl_target": 0.0},
    "default": {},
    "fixed, with reference": {"step_kl_target": 0.0, "use_ref_model": True},  # its KL is measured, too
    "default, with reference": {"use_ref_model": True},
    **{f"follows {target}": {"step_kl_target": target} for target in (0.02, 0.05, 0.1, 0.2)},
    "fixed, clip 0.2": {"step_kl_target": 0.0, "cliprange": 0.2},
    "default, clip 0.2": {"cliprange": 0.2},
    **{
        f"follows {target}, clip 0.2": {"step_kl_target": target, "cliprange": 0.2}
        for target in (0.025, 0.05, 0.1, 0.2, 0.3)
    },
    **{f"clips {share}": {"step_kl_target": share} for share in (0.1, 0.3)},  # a target of the clip fraction
}


KEYS = ("cell", "arm", "factor", "minibatches", "epochs", "seed")


def clip_sums(logprobs: Tensor, old_logprobs: Tensor, entropies: Tensor, actions: Tensor) -> Tensor:
    """Return (2,) sums in place of [`step_kl_sums`]: actions whose ratio is clipped at 0.4, and actions."""
    is_clipped = ((logprobs - old_logprobs).exp() - 1).abs() > 0.4
    count = actions.sum()
    # No clipped action says that the rate is too low; a share of exactly 0 would leave it as it is
    return torch.stack([(is_clipped * actions).sum().clamp(min=1e-3 * count), count])


def attempt(job: tuple) -> dict[str, Any]:
    """Train once, in silence; a run that ends by an error, with weights that are not finite, has fallen."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    cell, arm, factor, minibatches, epochs, seed, models = job
    shape = {"num_mini_batches": minibatches, "num_ppo_epochs": epochs}
    method = (
        {"trainer": "PPO", "baseline": "gated", "cliprange": None, "step_kl_target": PPOConfig.step_kl_target}
        | shape
        | ARMS[arm]
    )
    row = dict(zip(KEYS, job, strict=False))
    sums = clip_sums if arm.startswith("clips") else step_kl_sums
    try:
        with patch("trl_ext.ppo.trainer.step_kl_sums", sums):
            return row | train(cell, method, TUNED[cell] * factor, seed, CELLS[cell][1], models)
    except Exception as error:
        return row | {"error": repr(error)[:200]}


def table(rows: list[dict[str, Any]]) -> str:
    """Return for each cell, arm and shape of a rollout the mean areas by rate, and what they are of the tuned one."""
    firsts: dict[tuple, list[float]] = {}
    for row in rows:
        if "scores" in row:
            firsts.setdefault((row["cell"], row["seed"]), []).append(row["scores"][0])
    found: dict[tuple, list[tuple[float, float]]] = {}  # area and end of each seed
    for row in rows:
        start, key = fmean(firsts[row["cell"], row["seed"]]), tuple(row[name] for name in KEYS[:-1])
        shares = [(score - start) / (row["best"] - start) for score in row.get("scores", ())]
        result = (area(row["tokens"], shares, row["tokens"][-1]), fmean(shares[-3:])) if shares else (0.0, -1.0)
        found.setdefault(key, []).append(result)
    lines = []
    for cell in dict.fromkeys(row["cell"] for row in rows):
        tried = [found.get((cell, "fixed", factor, 1, 4)) for factor in FACTORS]
        tuned = max((fmean(area for area, _ in each) for each in tried if each), default=math.nan)
        rates = " | ".join(f"{factor:.3g} ×" for factor in FACTORS)
        lines += [f"\n**{cell}**: tuned {tuned:.3f}\n", f"| arm | shape | {rates} | mean ÷ tuned | worst | falls |"]
        lines.append("|---" * (len(FACTORS) + 5) + "|")
        for arm, *shape in sorted({(key[1], *key[3:]) for key in found if key[0] == cell}):
            here = [found.get((cell, arm, factor, *shape)) for factor in FACTORS]
            areas = [fmean(area for area, _ in each) if each else None for each in here]
            known = [each / tuned for each in areas if each is not None]
            falls = sum(len(each) > 1 and interval([end for _, end in each])[1] < 0 for each in here if each)
            shown = " | ".join("" if each is None else f"{each:.2f}" for each in areas)
            summary = f"{fmean(known):.2f} | {min(known):.2f} | {falls}"
            lines.append(f"| {arm} | {shape[0]} × {shape[1]} | {shown} | {summary} |")
    return "\n".join(lines)


def kl_table(rows: list[dict[str, Any]]) -> str:
    """Return a table of the KL to the first policy, nats a completion, when 50 and 80 % of the gain are reached."""
    found: dict[tuple, list[tuple[float, float]]] = {}
    for row in rows:
        if row.get("kl"):
            start = row["scores"][0]
            shares = [(score - start) / (row["best"] - start) for score in row["scores"]]
            kls = reached(row["kl"], shares, 0.5), reached(row["kl"], shares, 0.8)
            found.setdefault((row["cell"], row["arm"], row["factor"]), []).append(kls)
    lines = ["\n| task | arm | rate | KL at 50 % of the gain (seeds) | at 80 % |", "|---|---|---|---|---|"]
    for (cell, arm, factor), each in found.items():
        there = [[kl for kl in kls if kl < math.inf] for kls in zip(*each, strict=True)]
        shown = " | ".join(f"{fmean(kls):.1f} ({len(kls)})" if kls else "–" for kls in there)
        lines.append(f"| {cell} | {arm} | {factor:.3g} × | {shown} |")
    return "\n".join(lines) if found else ""


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Draw the first seed's scores over the tokens: a panel for each cell and arm, a line for each rate."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    rows = [
        row for row in rows if "scores" in row and row["seed"] == 0 and (row["minibatches"], row["epochs"]) == (1, 4)
    ]
    cells, arms = list(dict.fromkeys(row["cell"] for row in rows)), ("fixed", "default")
    figure = Figure(figsize=(4 * len(cells), 6), layout="constrained")
    for axes, (arm, cell) in zip(
        figure.subplots(2, len(cells), sharex="col", sharey="col", squeeze=False).flat,
        [(arm, cell) for arm in arms for cell in cells],
        strict=True,
    ):
        for row in (row for row in rows if (row["cell"], row["arm"]) == (cell, arm)):
            colour = colormaps["viridis"](FACTORS.index(row["factor"]) / len(FACTORS))
            axes.plot(row["tokens"], row["scores"], color=colour, label=f"{row['factor']:.2g} ×")
        axes.set(title=f"{cell}: {'fixed learning rate' if arm == 'fixed' else 'step_kl_target 0.1'}", xlabel="tokens")
        axes.legend(fontsize="x-small")
    figure.savefig(file, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=["short", "own start"])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["fixed", "default"])
    parser.add_argument("--minibatches", nargs="+", type=int, default=[1])
    parser.add_argument("--epochs", nargs="+", type=int, default=[4])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--picture", type=Path, help="draw the first seed's curves into this file")
    parser.add_argument("--out", type=Path, default=Path("outputs/step_size/rows.jsonl"))
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    done = {tuple(row[key] for key in KEYS) for row in rows}
    models = args.out.parent / "models"
    jobs = [
        (cell, arm, factor, minibatches, epochs, seed, models)
        for seed in range(args.seeds)
        for minibatches in args.minibatches
        for epochs in args.epochs
        for cell in args.cells
        for arm in args.arms
        for factor in FACTORS
    ]
    for cell, seed in {(job[0], job[5]) for job in jobs}:
        start_of(CELLS[cell][0](seed), seed, models)
    jobs = [job for job in jobs if job[:-1] not in done]
    import trl_ext.ppo.trainer  # noqa: F401  # once, before the fork

    with multiprocessing.get_context("fork").Pool(args.processes) as pool, args.out.open("a") as file:
        for row in pool.imap(attempt, jobs):
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
    print(table(rows), kl_table(rows), sep="\n")
    if args.picture:
        draw(rows, args.picture)


if __name__ == "__main__":
    main()
