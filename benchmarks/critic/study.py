"""What a critic is worth: our PPO with one, with a gated one and without, against TRL's GRPO and RLOO.

    python -m benchmarks.critic.study

Each method trains the same small model, which has imitated a poor player, in up to six worlds whose best score is
known. All pass four times over 64 answers, or over fewer; all but PPO with its defaults have no KL penalty. Most have
their learning rate from three, chosen by one run each on a seed of its own, once for the chain of symbols and once for
the lake. A run's curve has the true score of each 64 answers, over the tokens that were generated and over the
CPU-seconds of its own process.
The runs go breadth first, so that what is there at any time is a whole table; the same command again resumes. With
`--methods`, earlier runs of other methods with these seeds stay in the table. Writes a JSON a run into `runs/`, and
`critic.json`, `critic.md` and `critic.png`.
"""

if __name__ == "__main__":  # before the libraries that are imported next
    from trl_ext.upstream import quiet

    quiet()

import argparse
import gc
import json
import math
import os
import random
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from .worlds import ANSWERS, Chain, Lake, World, make_tokenizer, start_of

# Cell: its world by the seed, rollouts of a run, and what it is in words; the telling ones first
CELLS: dict[str, tuple[Callable[[int], World], int, str]] = {
    "own start": (lambda seed: Lake(None, seed), 20, "16 turns on slippery ice, each episode from a start of its own"),
    "noisy": (lambda seed: Chain(32, 0.25, seed=seed), 20, "32 tokens, one score at the end, 25 % of them flipped"),
    "long": (lambda seed: Chain(128, seed=seed), 8, "128 tokens, one score at the end"),
    "dense": (lambda seed: Chain(32, is_dense=True, seed=seed), 8, "32 tokens, a score for each"),
    "turns": (lambda seed: Lake(0, seed), 20, "16 turns on slippery ice, all from one start"),
    "short": (lambda seed: Chain(32, seed=seed), 12, "32 tokens, one score at the end"),
}
BASE = "critic (1.12)"  # our PPO with TRL 1.12's baseline, λ and clip range: each row's difference is from it
TUNED = {"own start": "own start", "turns": "own start"}  # cell: where its learning rates are chosen; else in `noisy`
# The best of 34 settings on FrozenLake, each on 6 to 12 of the seeds 1001 to 1012
FOR_FROZEN_LAKE = {"rate": 3e-3, "cliprange": 0.4, "answers": 16, "lam": 0.8, "critic_learning_rate": 6e-3}
NO_PENALTY = {"kl_coef": 0.0, "use_ref_model": False}
TRAINED_BEFORE = {"critic_warmup_rollouts": 32, "uncounted": 32}
# Method: trainer and settings; `answers` of a rollout, if not 64, and `uncounted` rollouts before its curve. `of`
# names another method, whose learning rate this one takes unless it has a `rate`. If both have the same trainer,
# rollouts of one size and minibatches, they do the same work, and this one takes the other's seconds, too: a
# difference would show only what else the machine was doing. If not, it has no seconds. With `defaults` PPO keeps the
# defaults that the other methods of the study change: baseline, clip range, minibatches and the target of a step,
# and the KL penalty unless the method has `NO_PENALTY`
METHODS: dict[str, dict[str, Any]] = {
    BASE: {"trainer": "PPO", "lam": 0.95},
    "gated": {"trainer": "PPO", "baseline": "gated"},
    "mean": {"trainer": "PPO", "baseline": "mean"},
    "GRPO": {"trainer": "GRPO", "num_generations": 8},
    "RLOO": {"trainer": "RLOO", "num_generations": 8},
    "bad critic": {"trainer": "PPO", "of": BASE, "critic_learning_rate": 0.3},
    "gated, bad critic": {"trainer": "PPO", "of": "gated", "baseline": "gated", "critic_learning_rate": 0.3},
    "critic, λ 1": {"trainer": "PPO", "of": BASE, "lam": 1.0},
    "critic, clip 0.4": {"trainer": "PPO", "of": BASE, "cliprange": 0.4},
    "critic, clip 0.4, learning rate 0.003": {"trainer": "PPO", "of": BASE, "rate": 3e-3, "cliprange": 0.4},
    "GRPO, clip 0.4": {"trainer": "GRPO", "of": "GRPO", "num_generations": 8, "epsilon": 0.4},
    "gated, clip 0.4": {"trainer": "PPO", "of": "gated", "baseline": "gated", "cliprange": 0.4},
    "mean, clip 0.4": {"trainer": "PPO", "of": "mean", "baseline": "mean", "cliprange": 0.4},
    "gated, 8 completions to a prompt": {"trainer": "PPO", "of": "gated", "baseline": "gated", "num_generations": 8},
    "critic, clip 0.4, rollouts of 32": {"trainer": "PPO", "of": BASE, "cliprange": 0.4, "answers": 32},
    "GRPO, clip 0.4, rollouts of 32": {
        **{"trainer": "GRPO", "of": "GRPO"},
        **{"num_generations": 8, "epsilon": 0.4, "answers": 32},
    },
    "critic, tuned for FrozenLake": {"trainer": "PPO", "of": BASE, **FOR_FROZEN_LAKE},
    "gated, tuned for FrozenLake": {"trainer": "PPO", "of": BASE, **FOR_FROZEN_LAKE, "baseline": "gated"},
    "GRPO, tuned for FrozenLake": {
        **{"trainer": "GRPO", "of": "GRPO", "rate": 3e-3, "num_generations": 8},
        **{"epsilon": 0.4, "answers": 16},
    },
    "PPO's defaults, no KL penalty": {"trainer": "PPO", "of": BASE, "rate": 3e-3, "defaults": True, **NO_PENALTY},
    "PPO's defaults, no KL penalty, learning rate 0.0003": {
        **{"trainer": "PPO", "of": BASE, "rate": 3e-4, "defaults": True},
        **NO_PENALTY,
    },
    "PPO's defaults": {"trainer": "PPO", "of": BASE, "rate": 3e-3, "defaults": True},
    "GRPO, clip 0.4, learning rate 0.0003": {
        **{"trainer": "GRPO", "of": "GRPO", "rate": 3e-4},
        **{"num_generations": 8, "epsilon": 0.4},
    },
    "critic (1.12), critic warm-up": {"trainer": "PPO", "of": BASE, "lam": 0.95, "critic_warmup_rollouts": 1},
    "critic (1.12), trained before": {"trainer": "PPO", "of": BASE, "lam": 0.95, **TRAINED_BEFORE},
    "critic (1.12), clip 0.4, trained before": {
        **{"trainer": "PPO", "of": BASE, "lam": 0.95, "cliprange": 0.4},
        **TRAINED_BEFORE,
    },
}
CHAINS = tuple(cell for cell in CELLS if cell not in TUNED)
ONLY_IN = {"bad critic": ("noisy",), "gated, bad critic": ("noisy",), "RLOO": CHAINS}
ONLY_IN |= {"gated, 8 completions to a prompt": CHAINS}
ONLY_IN |= dict.fromkeys(
    (
        "critic, clip 0.4, learning rate 0.003",
        "critic, tuned for FrozenLake",
        "gated, tuned for FrozenLake",
        "GRPO, tuned for FrozenLake",
    ),
    tuple(TUNED),
)
OTHER_CRITICS = (
    "critic (1.12), critic warm-up",
    "critic (1.12), trained before",
    "critic (1.12), clip 0.4, trained before",
)
ONLY_IN |= dict.fromkeys(OTHER_CRITICS, ("own start", "turns", "dense"))  # where a critic explains something
DRAWN = (BASE, "critic, clip 0.4", "gated, clip 0.4", "mean, clip 0.4")
DRAWN += ("GRPO", "GRPO, clip 0.4", "GRPO, clip 0.4, rollouts of 32", "RLOO")
BARS = {  # in the picture
    "gated, clip 0.4": "PPO, gated",
    "mean, clip 0.4": "PPO, mean (no critic)",
    "GRPO, clip 0.4": "GRPO, clip 0.4",
    "RLOO": "RLOO",
    BASE: "PPO as in TRL 1.12",
}
RATES = (1e-3, 3e-3, 1e-2)
TUNING_SEED = 1000
PASSES = 4
SHARES = (0.5, 0.8)  # of the gain from the start to the best score


class Watched:
    """
    Score answers, and note the mean true score of each 64 answers, the tokens so far and the CPU-seconds.

    The first `uncounted` rollouts of 64 answers are only scored.
    """

    __name__ = "score"

    def __init__(self, world: World, by_token: bool, uncounted: int = 0):
        self.world, self.by_token, self.begin, self.uncounted = world, by_token, time.process_time(), uncounted
        self.curve: list[tuple[int, float, float]] = []
        self.tokens = 0
        self.scores: list[float] = []  # of no point of the curve yet

    def __call__(self, prompts: list, completions: list, completion_ids: list, **columns: Any) -> list:
        scores = self.world.scores(prompts, completion_ids, **columns)
        if self.uncounted:
            self.uncounted, self.begin = self.uncounted - 1, time.process_time()
            return self.world.told(prompts, completion_ids, scores, self.by_token)
        self.tokens += sum(map(self.world.drawn, completion_ids))
        self.scores += scores
        if len(self.scores) >= ANSWERS:  # else smaller rollouts would have noisier points
            self.curve.append((self.tokens, time.process_time() - self.begin, fmean(self.scores)))
            self.scores = []
        return self.world.told(prompts, completion_ids, scores, self.by_token)


def train(cell: str, method: dict[str, Any], rate: float, seed: int, rollouts: int, models: Path) -> dict[str, Any]:
    """Train once, in this process, by a method as in `METHODS`; return the curve, and what the critic explained."""
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    from trl_ext import PPOConfig, PPOTrainer

    kinds = {"PPO": (PPOTrainer, PPOConfig), "GRPO": (GRPOTrainer, GRPOConfig), "RLOO": (RLOOTrainer, RLOOConfig)}
    world = CELLS[cell][0](seed)
    settings = dict(method)
    trainer_class, config_class = kinds[settings.pop("trainer")]
    for name in ("of", "rate"):
        settings.pop(name, None)
    is_default = settings.pop("defaults", False)
    answers, uncounted = settings.pop("answers", ANSWERS), settings.pop("uncounted", 0)
    is_ours, plays = config_class is PPOConfig, isinstance(world, Lake)
    if is_ours:
        own = {"baseline": "critic", "cliprange": 0.2, "num_ppo_epochs": PASSES, "step_kl_target": 0.0}
        own = {} if is_default else own | {"num_mini_batches": 1} | NO_PENALTY
        own |= {"watch": "off", "record_run": False}
        settings = own | ({"old_logprobs": "sampler"} if plays else {}) | settings  # what differs from ours is named
    else:
        settings |= {"num_iterations": PASSES, "beta": 0.0}
    minibatches = settings.get("num_mini_batches", PPOConfig.num_mini_batches if is_ours else 1)
    steps = minibatches * settings.get("num_ppo_epochs", PASSES)  # on a rollout
    tokenizer, watched = make_tokenizer(world), Watched(world, is_ours, uncounted)

    def play(prompts: list, trainer: Any) -> dict[str, list]:
        model = trainer.accelerator.unwrap_model(trainer.model)
        return world.play(model.policy if is_ours else model, len(prompts), tokenizer)  # type: ignore[union-attr]

    prompts = world.prompts()
    with tempfile.TemporaryDirectory() as folder:
        args = config_class(
            folder,
            per_device_train_batch_size=answers // minibatches,
            max_completion_length=world.tokens,
            learning_rate=rate,
            lr_scheduler_type="constant",
            max_steps=(uncounted + rollouts * ANSWERS // answers) * steps,
            seed=seed,
            logging_steps=steps,
            use_cpu=True,
            bf16=False,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            dataloader_pin_memory=False,
            **{"activation_checkpointing" if is_ours else "gradient_checkpointing": False},
            **settings,
        )
        trainer = trainer_class(
            model=start_of(world, seed, models),
            reward_funcs=watched,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": prompts * math.ceil(ANSWERS / len(prompts))}),
            processing_class=tokenizer,
            **({"rollout_func": play} if plays else {}),
        )
        torch.manual_seed(seed)
        watched.begin = time.process_time()
        trainer.train()
    logs = trainer.state.log_history
    tokens, seconds, scores = zip(*watched.curve, strict=True)
    return {
        "best": world.best,
        "tokens": list(tokens),
        "seconds": [round(x, 2) for x in seconds],
        "scores": [round(x, 4) for x in scores],
        "kl": [log["objective/kl"] for log in logs if "objective/kl" in log],
        "explained": [round(log["val/explained_variance"], 3) for log in logs if "val/explained_variance" in log],
        "weights": [round(log["val/baseline_weight"], 3) for log in logs if "val/baseline_weight" in log],
    }


def name_of(cell: str, method: str, rate: float, seed: int) -> str:
    return f"{cell}-{method}-{rate:g}-{seed}".replace(" ", "_").replace(",", "")


def run(cell: str, method: str, rate: float, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the result of a run, from its file or from a process of its own."""
    file = args.output_dir / "runs" / f"{name_of(cell, method, rate, seed)}.json"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        rollouts = args.rollouts or CELLS[cell][1]
        start_of(CELLS[cell][0](seed), seed, args.output_dir / "models")  # shared, so no method pays for it
        child = os.fork()
        if child == 0:
            status = 1
            try:
                result = train(cell, METHODS[method], rate, seed, rollouts, args.output_dir / "models")
                result = {"cell": cell, "method": method, "learning rate": rate, "seed": seed, **result}
                partial = file.with_suffix(".partial")
                partial.write_text(json.dumps(result))
                partial.replace(file)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            raise RuntimeError(f"{file.stem} failed: its error is above")
        print(f"{time.strftime('%H:%M:%S')} {file.stem}", flush=True)
    return json.loads(file.read_text())


def methods_in(cell: str, names: Sequence[str]) -> list[str]:
    """Return the methods that are tried in a cell, by `ONLY_IN`: RLOO, for example, has no environments."""
    return [name for name in names if cell in ONLY_IN.get(name, (cell,))]


def rate_of(method: str, rates: dict[str, float]) -> float | None:
    """Return a method's learning rate; None if the method whose rate it takes has not been tried."""
    return METHODS[method].get("rate", rates.get(METHODS[method].get("of", method)))


def others(cell: str, seed: int, rates: dict[str, float], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return earlier results, for a cell and seed, of the methods that are not asked for now, with the same rates."""
    files = [
        args.output_dir / "runs" / f"{name_of(cell, name, rate, seed)}.json"
        for name in methods_in(cell, list(METHODS))
        if name not in args.methods and (rate := rate_of(name, rates)) is not None
    ]
    return [json.loads(file.read_text()) for file in files if file.exists()]


# ---- What the curves say ----


def area(at: Sequence[float], shares: Sequence[float], end: float) -> float:
    """
    Return the mean share of the gain from 0 to `end`, linear between the rollouts and level before the first.

    Args:
        at: tokens or seconds at which each rollout was there.
        shares: of the gain, at each.
        end: in the unit of `at`, at most the last.
    """
    points = [(0.0, shares[0]), *zip(at, shares, strict=True)]
    total = 0.0
    for (left, low), (right, high) in zip(points, points[1:], strict=False):
        if left >= end:
            break
        cut = min(right, end)
        at_cut = low + (high - low) * (cut - left) / (right - left) if right > left else high
        total += (cut - left) * (low + at_cut) / 2
    return total / end


def reached(at: Sequence[float], shares: Sequence[float], share: float) -> float:
    """Return where the moving mean of three rollouts first has this share of the gain; infinity if nowhere."""
    smooth = [fmean(shares[max(i - 1, 0) : i + 2]) for i in range(len(shares))]
    return next((float(x) for x, y in zip(at, smooth, strict=True) if y >= share), math.inf)


def work(method: str) -> tuple[str, int, bool]:
    """Return what a method's seconds depend on: its trainer, the answers of a rollout, and PPO's own minibatches."""
    of = METHODS[method]
    return of["trainer"], of.get("answers", ANSWERS), of.get("defaults", False)


def by_one_clock(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    Return a seed's runs. A method that takes another's learning rate also takes its seconds if both do the same work.

    Otherwise its seconds become None, since it may have been run later, on another machine.
    """
    seconds = {run["method"]: run["seconds"] for run in runs}

    def of(method: str) -> str:
        return METHODS[method].get("of", method)

    def timed(method: str) -> list[float] | None:
        return seconds.get(of(method)) if work(method) == work(of(method)) else None

    return [run | {"seconds": timed(run["method"])} for run in runs]


def figures(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """
    Return the figures of each method's run in one cell and seed, on the budgets that all of them have spent.

    The gain goes from the mean first score of all runs, which start from one model, to the best score. The first score
    of smaller rollouts is left out, because it already has an update in it.
    """
    start = fmean(run["scores"][0] for run in runs if work(run["method"])[1] == ANSWERS)
    runs = by_one_clock(runs)
    ends = {unit: min(run[unit][-1] for run in runs if run[unit]) for unit in ("tokens", "seconds")}
    result = {}
    for run in runs:
        shares = [(score - start) / (run["best"] - start) for score in run["scores"]]
        result[run["method"]] = {
            **{f"by {unit}": area(run[unit], shares, ends[unit]) if run[unit] else None for unit in ends},
            "end": fmean(shares[-3:]),
            **{
                f"{unit} to {x:g}": reached(run[unit], shares, x) if run[unit] else math.inf
                for unit in ends
                for x in SHARES
            },
            "explained": fmean(run["explained"][len(run["explained"]) // 2 :]) if run["explained"] else None,
            "weight": fmean(run["weights"]) if run["weights"] else None,
        }
    return result


def interval(values: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of a mean of paired differences."""
    draw = random.Random(0)
    means = sorted(fmean(draw.choices(values, k=len(values))) for _ in range(draws))
    return means[int(0.025 * draws)], means[int(0.975 * draws) - 1]


def chosen_rate(tuning: list[dict[str, Any]]) -> float:
    """Return the rate of the run with the highest mean score over its tokens."""
    return max(tuning, key=lambda run: area(run["tokens"], run["scores"], run["tokens"][-1]))["learning rate"]


def summary(results: dict[str, list[list[dict[str, Any]]]], tuning: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Return the figures of each cell: of each method over the seeds, and its differences from those of `BASE`."""
    cells = {}
    for cell, seeds in results.items():
        found = [figures(runs) for runs in seeds]
        methods: dict[str, Any] = {}
        for method in [name for name in METHODS if any(name in each for each in found)]:
            paired = [each for each in found if method in each]
            own = [each[method] for each in paired]
            row: dict[str, Any] = {"learning rate": rate_of(method, tuning[cell]), "seeds": len(own)}
            for key in ("by tokens", "by seconds", "end"):
                if own[0][key] is None:
                    continue
                row[key] = round(fmean(x[key] for x in own), 4)
                differences = [each[method][key] - each[BASE][key] for each in paired]
                row[f"{key} − {BASE}"] = round(fmean(differences), 4)
                if len(own) > 1 and method != BASE:
                    row[f"{key} − {BASE}, 95 %"] = [round(x, 4) for x in interval(differences)]
            row["spread of the end"] = round((fmean((x["end"] - row["end"]) ** 2 for x in own)) ** 0.5, 4)
            for key in [key for key in own[0] if " to " in key]:
                value = median(x[key] for x in own)
                row[key] = round(value, 1) if math.isfinite(value) else None
            for key in ("explained", "weight"):
                row[key] = round(median(x[key] for x in own), 3) if own[0][key] is not None else None
            methods[method] = row
        cells[cell] = {"what": CELLS[cell][2], "seeds": len(seeds), "methods": methods}
    return cells


def table(cells: dict[str, Any]) -> str:
    """Return the table of the summary: shares of the gain over both budgets, with their differences from `BASE`."""
    lines = [
        f"| cell | method | gain over the tokens | − {BASE} | gain over the seconds | − {BASE} | gain at the end "
        "| tokens to 50 % | to 80 % | s to 50 % | explained | w |",
        "|---" * 12 + "|",
    ]

    def difference(row: dict[str, Any], key: str) -> str:
        if f"{key} − {BASE}, 95 %" not in row:
            return ""
        low, high = row[f"{key} − {BASE}, 95 %"]
        return f"{row[f'{key} − {BASE}']:+.2f} [{low:+.2f}, {high:+.2f}]"

    def number(x: float | None, form: str) -> str:
        return "–" if x is None else format(x, form)

    for cell, found in cells.items():
        for i, (method, row) in enumerate(found["methods"].items()):
            of_fewer = f" ({row['seeds']} seeds)" if row["seeds"] < found["seeds"] else ""
            shown = [f"**{cell}**, {found['seeds']} seeds" if i == 0 else "", method + of_fewer]
            shown += [f"{row['by tokens']:.2f}", difference(row, "by tokens")]
            shown += [number(row.get("by seconds"), ".2f"), difference(row, "by seconds"), f"{row['end']:.2f}"]
            shown += [number(row[f"tokens to {x:g}"], ",.0f") for x in SHARES]
            shown += [
                number(row["seconds to 0.5"], ".1f"),
                number(row["explained"], ".2f"),
                number(row["weight"], ".2f"),
            ]
            lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def overview(cells: dict[str, Any]) -> str:
    """
    Return three small tables, a row a method and a column a cell: the gain over each budget, and at the end.

    The table over the seconds leaves out the methods that take another one's learning rate, and the end is that of the
    methods in `DRAWN`.
    """
    parts = []
    own = [method for method in METHODS if "of" not in METHODS[method]]
    for key, title, methods in (
        ("by tokens", "tokens", METHODS),
        ("by seconds", "CPU-seconds", own),
        ("end", "the end", DRAWN),
    ):
        lines = [f"| {title} | {' | '.join(cells)} |", "|---" * (len(cells) + 1) + "|"]
        for method in methods:
            shown = []
            for found in cells.values():
                row = found["methods"].get(method, {})
                low, high = row.get(f"{key} − {BASE}, 95 %", (math.nan, math.nan))
                shown.append(f"{row[key]:.2f}" if key in row else "–")
                shown[-1] += "" if math.isnan(low) or key == "end" else f" [{low:+.2f}, {high:+.2f}]"
            if {*shown} != {"–"}:
                lines.append(f"| {method} | {' | '.join(shown)} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def draw(cells: dict[str, Any], path: Path) -> None:
    """Draw the gain over the tokens of the methods in `BARS`, grouped by cell, with the intervals of the table."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(10, 4))
    for number, (method, label) in enumerate(BARS.items()):
        rows = {at: of["methods"][method] for at, of in enumerate(cells.values()) if method in of["methods"]}
        places = [at + (number - (len(BARS) - 1) / 2) * 0.16 for at in rows]
        means = [row["by tokens"] for row in rows.values()]
        ends = [row.get(f"by tokens − {BASE}, 95 %", [0.0, 0.0]) for row in rows.values()]
        offsets = [row["by tokens"] - row[f"by tokens − {BASE}"] for row in rows.values()]
        lows = [max(0.0, mean - first - low) for mean, first, (low, _) in zip(means, offsets, ends, strict=True)]
        highs = [max(0.0, first + high - mean) for mean, first, (_, high) in zip(means, offsets, ends, strict=True)]
        errors = [lows, highs] if method != BASE else None
        axis.bar(places, means, 0.15, yerr=errors, label=label, color=f"C{number}", error_kw={"elinewidth": 0.8})
    axis.set(xticks=range(len(cells)), ylabel="share of the possible gain, mean over tokens")
    axis.set_xticklabels(cells)
    axis.legend(ncols=len(BARS), loc="upper center", bbox_to_anchor=(0.5, -0.08), fontsize="small", frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def report(results: dict, tuning: dict, rates: dict, output_dir: Path) -> None:
    cells = summary(results, rates)
    (output_dir / "critic.json").write_text(json.dumps({"cells": cells, "tuning": tuning}) + "\n")
    (output_dir / "critic.md").write_text(f"{overview(cells)}\n{table(cells)}")
    draw(cells, output_dir / "critic.png")


def study(args: argparse.Namespace) -> Iterator[tuple[dict, dict, dict]]:
    """Yield what there is after each seed: results, tuning runs and chosen rates, by cell."""
    results: dict[str, list] = {}
    tuning: dict[str, list] = {}
    rates: dict[str, dict[str, float]] = {}
    for number, seed in enumerate(args.seeds):
        for cell in args.cells:
            methods, tuned = methods_in(cell, args.methods), TUNED.get(cell, "noisy")
            if tuned not in tuning:
                tried = [name for name in methods_in(tuned, args.methods) if "of" not in METHODS[name]]
                tuning[tuned] = [run(tuned, name, rate, TUNING_SEED, args) for rate in args.rates for name in tried]
            if cell not in rates:
                found = tuning[tuned]
                names = dict.fromkeys(each["method"] for each in found)
                rates[cell] = {name: chosen_rate([each for each in found if each["method"] == name]) for name in names}
            of_seed = [run(cell, name, rate_of(name, rates[cell]), seed, args) for name in methods]
            of_seed += others(cell, seed, rates[cell], args)
            results.setdefault(cell, [])
            assert len(results[cell]) == number
            results[cell].append(of_seed)
        yield results, tuning, rates


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.critic.study", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(20)))
    parser.add_argument("--cells", nargs="+", default=list(CELLS), choices=CELLS, metavar="CELL", help="default: all")
    parser.add_argument(
        "--methods", nargs="+", default=list(METHODS), choices=METHODS, metavar="METHOD", help="default: all"
    )
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES), help="learning rates to choose from")
    parser.add_argument("--rollouts", type=int, help="of each run; default: the cell's")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/critic"))
    args = parser.parse_args(arguments)
    if TUNING_SEED in args.seeds:
        parser.error(f"`--seeds` has the seed {TUNING_SEED}, which learning rates are chosen on: leave it out")
    if BASE not in args.methods:
        parser.error(f"`--methods` lacks {BASE}, which the others are compared with")

    import torch
    from trl import GRPOTrainer, RLOOTrainer  # noqa: F401  # before the runs' processes, so that none pays for it

    from trl_ext import PPOTrainer  # noqa: F401

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # accelerate collects at each training: what is imported need not be looked through
    for found in study(args):
        report(*found, args.output_dir)
    print((args.output_dir / "critic.md").read_text())


if __name__ == "__main__":
    main()
