"""Teach and train in each environment of this folder, with several seeds: a table and a picture of the success.

    python -m recipes.agents.study

An episode's reward is 0 or 1, and success its mean over the 200 starts of the `test` split, where nothing is trained.
The same command again makes only what is not there yet.
"""

import argparse
import importlib
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from . import teach


def seconds(command: list[str]) -> tuple[float, float]:
    """Run a command by one thread; return its seconds by the clock and of the CPU."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - begin, used


def learn(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """Return what the runs of one seed came to: success by episodes, and seconds."""
    written = folder / "result.json"
    if not written.exists():
        module, run = importlib.import_module(f"{__package__}.{name}"), folder / "ppo"
        seed_of = ["--seed", str(seed)]
        taught = seconds([sys.executable, "-m", f"{__package__}.teach", name, "--output_dir", str(folder), *seed_of])
        paths = ["--model_name_or_path", folder / "sft", "--dataset_name", folder / "rows", "--output_dir", run]
        trained = seconds(["trl-ext", "ppo", "--config", f"agents/{name}", *map(str, paths), *seed_of])
        result = {
            "player": teach.success(module, module.Player()),
            "taught": taught,
            "trained": trained,
            "curve": curve(run / "metrics.rank0.jsonl"),
        }
        written.write_text(json.dumps(result))
    return json.loads(written.read_text())


def curve(path: Path) -> list[tuple[int, float, float]]:
    """Return (episodes, success at temperature 1, greedy success) at each evaluation of a run."""
    result, episodes = {}, 0
    for line in map(json.loads, path.read_text().splitlines()):
        logs = line.get("logs", {})
        episodes = int(logs.get("episode", episodes))
        if "eval_objective/scores" in logs:
            result[episodes] = logs["eval_objective/scores"], logs["eval_greedy/objective/scores"]
    return [(episodes, *scores) for episodes, scores in result.items()]


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Return a table of means over the seeds, with the last success of the worst seed."""
    lines = [
        "| recipe | player | start, sampled | end, sampled | worst seed | start, greedy | end, greedy "
        "| SFT, CPU s | PPO, CPU s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in results.items():
        ends = [run["curve"][-1][1] for run in runs]
        figures = [
            fmean(run["player"] for run in runs),
            fmean(run["curve"][0][1] for run in runs),
            fmean(ends),
            min(ends),
            fmean(run["curve"][0][2] for run in runs),
            fmean(run["curve"][-1][2] for run in runs),
        ]
        spent = [fmean(run[part][1] for run in runs) for part in ("taught", "trained")]
        lines.append(" | ".join([f"| `{name}`", *(f"{x:.2f}" for x in figures), *(f"{x:.0f}" for x in spent)]) + " |")
    return "\n".join(lines) + "\n"


def draw(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draw success over episodes, a line for each seed, and the scripted player's success."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(2.8 * len(results), 2.8), sharey=True, squeeze=False)
    for axis, (name, runs) in zip(axes[0], results.items(), strict=True):
        for run in runs:
            episodes, sampled, greedy = zip(*run["curve"], strict=True)
            axis.plot(episodes, sampled, color="tab:blue", label="sampled")
            axis.plot(episodes, greedy, color="tab:orange", linewidth=0.8, label="greedy")
        axis.axhline(runs[0]["player"], color="gray", linestyle="--", label="scripted player")
        axis.set(title=name, xlabel="episodes", ylim=(0, 1.03))
    axes[0][0].set_ylabel("success")
    lines, labels = axes[0][0].get_legend_handles_labels()
    unique = dict(zip(labels, lines, strict=True))
    axes[0][0].legend(unique.values(), unique.keys(), loc="lower right", fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m recipes.agents.study", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--names", nargs="+", default=teach.NAMES, choices=teach.NAMES, metavar="NAME", help="default: all"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/agents/study"))
    args = parser.parse_args(arguments)
    results = {
        name: [learn(name, seed, args.output_dir / name / str(seed)) for seed in args.seeds] for name in args.names
    }
    (args.output_dir / "agents.md").write_text(table(results))
    draw(results, args.output_dir / "agents.png")
    print(table(results))


if __name__ == "__main__":
    main()
