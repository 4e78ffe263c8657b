"""What the ways to choose β give on the demo's world, where the true quality of an answer is known; what they cost.

    python -m benchmarks.dpo demo   # 5 settings × {0 %, 25 %} flipped labels × 5 seeds: some 30 minutes
    python -m benchmarks.dpo real --model PATH --pairs FILE.jsonl
    python -m benchmarks.dpo time

One process, one thread. Finished runs are kept as JSON, so the same command again resumes where it stopped, and prints
its tables: means over seeds with 95 % Student intervals.
"""

import argparse
import itertools
import json
import math
import random
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes import dpo
from recipes.demo.measure import measure
from recipes.demo.stages import HERE, DemoArguments, sft_stage, use_one_thread
from trl_ext import DPOConfig, DPOTrainer

FOLDER = Path("outputs/benchmarks/dpo")
DRIFT = ["--beta_controller", "drift", "--drift_target", "2.0"]
SETTINGS = {
    "fixed 0.05": ["--beta", "0.05"],
    "fixed 0.1": [],
    "fixed 0.3": ["--beta", "0.3"],
    "drift": DRIFT,
    "drift, horizon 500": [*DRIFT, "--drift_horizon", "500"],
}
FLIPPED = (0.0, 0.25)
COLUMNS = {
    "accuracy": ("held-out accuracy", ".3f"),
    "gold": ("gold", ".3f"),
    "kl": ("KL, nats", ".2f"),
    "chosen_delta": ("chosen log-prob drift, nats", "+.2f"),
    "drift": ("`logps/drift`, nats", ".2f"),
    "displacement": ("displaced", ".2f"),
    "beta": ("β at the end", ".3f"),
}
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}  # 97.5 %


def cached(path: Path, compute: Callable[[], dict]) -> dict:
    if not path.is_file():
        result = compute()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".tmp").write_text(json.dumps(result, indent=2))
        path.with_suffix(".tmp").replace(path)
    return json.loads(path.read_text())


def mean_interval(values: list[float], form: str) -> str:
    if len(values) == 1:
        return f"{values[0]:{form}}"
    half = STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.mean(values):{form}} ± {half:{form.lstrip('+')}}"


def flip(source: Path, target: Path, share: float, seed: int) -> Path:
    """The world's preferences with this share of the training labels turned round; the held-out ones stay right."""
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(source / "test.jsonl", target)
    rows = [json.loads(line) for line in (source / "train.jsonl").read_text().splitlines()]
    for row in random.Random(f"{seed} flips").sample(rows, round(share * len(rows))):
        row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    (target / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return target


def demo_run(args: DemoArguments, flipped: float, name: str) -> dict:
    sft, work, start = sft_stage(args), args.folder / "run", time.time()
    shutil.rmtree(work, ignore_errors=True)
    data = flip(args.folder / "world" / "preferences", work / "data", flipped, args.seed)
    paths = ["--config", HERE / "dpo.yaml", "--model_name_or_path", sft, "--dataset_name", data]
    paths += ["--output_dir", work / "model", "--seed", args.seed, "--disable_tqdm", "true"]
    dpo.main([*map(str, paths), *SETTINGS[name]])
    seconds = time.time() - start
    logs = json.loads((work / "model" / "eval_results.json").read_text())
    tokenizer, reference = AutoTokenizer.from_pretrained(sft), AutoModelForCausalLM.from_pretrained(sft)
    rows = [json.loads(line) for line in (args.folder / "world/prompts/test.jsonl").read_text().splitlines()]
    policy = AutoModelForCausalLM.from_pretrained(work / "model")
    measured = measure(policy, reference, None, tokenizer, rows, args.seed)
    shutil.rmtree(work)
    return {
        "accuracy": logs["eval_rewards/accuracies"],
        "gold": measured.gold.mean().item(),
        "kl": measured.kl.mean().item(),
        "chosen_delta": logs["eval_logps/chosen_delta"],
        "drift": logs["eval_logps/drift"],
        "displacement": logs["eval_logps/displacement_rate"],
        "beta": logs["eval_beta"],
        "seconds": seconds,
    }


def demo(seeds: int, settings: list[str], baseline: str) -> None:
    results: dict[tuple[float, str], list[dict]] = {}
    for name, seed, flipped in itertools.product(settings, range(seeds), FLIPPED):
        # Annotators that never slip: the flips are the only noise
        args = DemoArguments(seed, str(FOLDER), planted_share=0.0, label_noise=0.0)
        path = args.folder / f"{name.replace(', ', '-').replace(' ', '-')} {flipped:g}.json"
        known = path.is_file()
        result = cached(path, lambda a=args, f=flipped, n=name: demo_run(a, f, n))
        results.setdefault((flipped, name), []).append(result)
        if not known:
            print(f"seed {seed}, {flipped:.0%} flipped, {name}: {result}", flush=True)
    sft = [cached(FOLDER / f"seed-{seed}" / "sft.json", lambda s=seed: sft_gold(s))["gold"] for seed in range(seeds)]
    print(f"\n{seeds} seeds; gold of SFT {mean_interval(sft, '.3f')}\n")
    for flipped in FLIPPED:
        print(f"{flipped:.0%} flipped\n\n| setting | {' | '.join(title for title, _ in COLUMNS.values())} |")
        print("|---" * (len(COLUMNS) + 1) + "|")
        for name in settings:
            runs = results[flipped, name]
            cells = [mean_interval([run[key] for run in runs], form) for key, (_, form) in COLUMNS.items()]
            print(f"| {name} | {' | '.join(cells)} |")
        print(f"\nMinus {baseline}, seed by seed:\n\n| setting | accuracy | gold | KL, nats | drift, nats |")
        print("|---|---|---|---|---|")
        for name in settings:
            if name != baseline:
                pairs = list(zip(results[flipped, name], results[flipped, baseline], strict=True))
                cells = [
                    mean_interval([a[key] - b[key] for a, b in pairs], "+.3f")
                    for key in ("accuracy", "gold", "kl", "drift")
                ]
                print(f"| {name} | {' | '.join(cells)} |")
        print()


def sft_gold(seed: int) -> dict:
    args = DemoArguments(seed, str(FOLDER), planted_share=0.0, label_noise=0.0)
    sft = sft_stage(args)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(sft), AutoTokenizer.from_pretrained(sft)
    rows = [json.loads(line) for line in (args.folder / "world/prompts/test.jsonl").read_text().splitlines()]
    return {"gold": measure(model, model, None, tokenizer, rows, seed).gold.mean().item()}


def config(folder: Path, cls: type = DPOConfig, **kwargs) -> DPOConfig:
    quiet = {
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
    }
    return cls(str(folder), **{**quiet, "save_strategy": "no", **kwargs})


def real(model: str, pairs: Path, seeds: int) -> None:
    """Does it run on real pairs, and does the loss fall? Only pairs whose prompts leave room in the context."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    limit = AutoModelForCausalLM.from_pretrained(model).config.max_position_embeddings
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    rows = [{name: row[name] for name in ("prompt", "chosen", "rejected")} for row in rows]
    sound = [row for row in rows if row["chosen"] and row["rejected"] and row["chosen"] != row["rejected"]]

    # Answers may be cut off, but not before they have begun to differ
    def begins(row: dict) -> list[list[int]]:
        return [tokenizer(row["prompt"] + row[name])["input_ids"][:limit] for name in ("chosen", "rejected")]

    fitting = [row for row in sound if len(tokenizer(row["prompt"])["input_ids"]) < 0.8 * limit]
    fitting = [row for row in fitting if len(set(map(tuple, begins(row)))) == 2]
    print(f"{len(rows)} pairs, {len(sound)} with two different answers, {len(fitting)} fit into {limit} tokens")
    print("\n| setting | loss, first and last fifth | train accuracy, last fifth | held-out accuracy | drift |")
    print("|---|---|---|---|---|")
    for name, options in {
        "fixed 0.1": {"log_displacement": True},
        "drift": {"beta_controller": "drift", "drift_target": 2.0},
    }.items():
        runs = []
        for seed in range(seeds):
            path = FOLDER / "real" / f"{name.replace(' ', '-')} {seed}.json"
            runs.append(cached(path, lambda s=seed, o=options: real_run(model, fitting, s, limit, o)))
        cells = [
            f"{statistics.mean(r['first'] for r in runs):.3f} → {mean_interval([r['last'] for r in runs], '.3f')}"
        ]
        cells += [mean_interval([run[key] for run in runs], ".3f") for key in ("train_accuracy", "accuracy", "drift")]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def real_run(model: str, rows: list[dict], seed: int, limit: int, options: dict) -> dict:
    split = Dataset.from_list(rows).train_test_split(0.25, seed=seed)
    args = config(
        FOLDER / "real" / "run",
        seed=seed,
        max_length=limit,
        num_train_epochs=3,
        per_device_train_batch_size=8,
        learning_rate=1e-4,
        logging_steps=1,
        **options,
    )
    trainer = DPOTrainer(model, args=args, train_dataset=split["train"], eval_dataset=split["test"])
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    fifth, evaluation = len(logs) // 5, trainer.evaluate()
    return {
        "first": statistics.mean(entry["loss"] for entry in logs[:fifth]),
        "last": statistics.mean(entry["loss"] for entry in logs[-fifth:]),
        "train_accuracy": statistics.mean(entry["rewards/accuracies"] for entry in logs[-fifth:]),
        "accuracy": evaluation["eval_rewards/accuracies"],
        "drift": evaluation["eval_logps/drift"],
    }


def timing(repeats: int, steps: int = 20) -> None:
    """CPU seconds a step of three trainers in turn, on the demo's pairs; the ratio to TRL's within each turn."""
    args = DemoArguments(0, str(FOLDER), planted_share=0.0, label_noise=0.0)
    sft = sft_stage(args)
    lines = (args.folder / "world/preferences/train.jsonl").read_text().splitlines()
    rows = [{name: json.loads(line)[name] for name in ("prompt", "chosen", "rejected")} for line in lines]
    shared = {"max_steps": steps, "per_device_train_batch_size": 32, "learning_rate": 0.0, "logging_steps": steps}
    makers: dict[str, Callable] = {
        "TRL": lambda: (trl.DPOTrainer, config(FOLDER / "time", trl.DPOConfig, **shared)),
        "options off": lambda: (DPOTrainer, config(FOLDER / "time", **shared)),
        "drift": lambda: (
            DPOTrainer,
            config(FOLDER / "time", beta_controller="drift", drift_target=2.0, **shared),
        ),
    }
    trainers = {}
    for name, make in makers.items():
        trainer, trainer_args = make()
        trainers[name] = trainer(str(sft), args=trainer_args, train_dataset=Dataset.from_list(rows))
    seconds: dict[str, list[float]] = {name: [] for name in makers}
    for turn in range(repeats + 1):
        for name in sorted(makers, key=lambda _: random.random()):
            start = time.process_time()  # a busy machine stretches the wall clock
            trainers[name].train()
            if turn:  # the first one warms up
                seconds[name].append((time.process_time() - start) / steps)
    print(f"TRL: {1000 * statistics.median(seconds['TRL']):.1f} ms of CPU a step, {repeats} turns of {steps} steps")
    for name in ("options off", "drift"):
        ratios = torch.tensor([a / b for a, b in zip(seconds[name], seconds["TRL"], strict=True)])
        resampled = ratios[torch.randint(len(ratios), (4000, len(ratios)))].median(1).values
        low, high = resampled.quantile(torch.tensor([0.025, 0.975])).tolist()
        print(f"{name} / TRL: {ratios.median():.3f} ({low:.3f} to {high:.3f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["demo", "real", "time"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=[*SETTINGS])
    parser.add_argument("--baseline", choices=SETTINGS, default="fixed 0.1", help="one of the settings")
    parser.add_argument("--model")
    parser.add_argument("--pairs", type=Path)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    use_one_thread()
    match args.part:
        case "demo":
            demo(args.seeds, args.settings, args.baseline)
        case "real":
            if not (args.model and args.pairs):
                parser.error("real needs --model and --pairs")
            real(args.model, args.pairs, args.seeds)
        case "time":
            timing(args.repeats)


if __name__ == "__main__":
    main()
