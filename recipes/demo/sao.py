"""Compare SAO (GLM-5.2's critic PPO, 2607.07508), our PPO, and TRL's GRPO and RLOO at equal generated tokens.

    python -m recipes.demo.sao --seeds 0 1 2 3 4 --tuning_seeds 8 9

Each algorithm trains the demo's SFT model on its reward model alone, with one fixed KL coefficient, on 64 answers a
rollout, until it has generated `tokens` tokens. Its learning rate is the one of the grid that reaches the highest
proxy − kl_coef · KL on the held-out prompts of the tuning seeds, whose worlds are not measured otherwise; a critic's
rate is five times that. Each of SAO's settings is also tried alone, in PPO with PPO's learning rate. Writes
`sao.jsonl`, a row a run, and `sao.md`; the same command again goes on where it stopped, also with more seeds.
"""

if __name__ == "__main__":  # before the libraries that are imported next
    from trl_ext.upstream import quiet

    quiet()

import itertools
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from trl_ext import PPOConfig, PPOTrainer, StrictTrlParser
from trl_ext.rewards import ModelReward
from trl_ext.runs import setting

from .measure import MAX_NEW_TOKENS, measure
from .seeds import SeededStudyArguments, check_grid, in_words
from .stages import DemoArguments, reward_stage, sft_stage, use_one_thread

ROLLOUT = 64  # answers
QUIET = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
SHARED = {**QUIET, "logging_steps": 1000, "lr_scheduler_type": "constant", "max_steps": 100_000}
SHARED |= {"max_completion_length": MAX_NEW_TOKENS, "dataloader_pin_memory": False, "activation_checkpointing": False}
WHOLE = {**SHARED, "per_device_train_batch_size": ROLLOUT}  # one update of the policy a rollout
PPO = {
    **SHARED,
    "per_device_train_batch_size": ROLLOUT // 2,
    "num_mini_batches": 2,
    "num_ppo_epochs": 4,
    "vf_coef": 0.5,
}
SAO = {
    "lam_alpha": 1.5,
    "ratio_band": [0.7, 6.0],
    "critic_steps": 2,
    "critic_trains": "mlp",
    "critic_warmup_rollouts": 10,
}
ALGORITHMS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "PPO": (PPOTrainer, PPOConfig, PPO),
    "SAO": (PPOTrainer, PPOConfig, {**WHOLE, "num_ppo_epochs": 1, "vf_coef": 0.5, **SAO}),
    "GRPO": (GRPOTrainer, GRPOConfig, {**WHOLE, "num_generations": 8}),
    "RLOO": (RLOOTrainer, RLOOConfig, {**WHOLE, "num_generations": 4}),
    **{f"PPO + {name}": (PPOTrainer, PPOConfig, {**PPO, name: value}) for name, value in SAO.items()},
}
MEASURED = ("gold", "proxy", "kl", "length", "ended")


@dataclass
class SAOStudyArguments(SeededStudyArguments):
    """Declare which algorithms are compared, on which seeds, and for how many tokens."""

    tuning_seeds: list[int] = field(
        default_factory=lambda: [8, 9], metadata={"help": "Seeds on which learning rates are chosen."}
    )
    learning_rates: list[float] = field(
        default_factory=lambda: [5e-5, 1.5e-4, 5e-4, 1.5e-3, 5e-3],
        metadata={"help": "Rates of the policy, to choose from."},
    )
    algorithms: list[str] = field(default_factory=lambda: list(ALGORITHMS), metadata={"help": "What is compared."})
    tokens: int = setting(100_000, "Tokens that each run generates.")
    kl_coef: float = setting(0.05, "Fixed KL coefficient.")
    planted_share: float = setting(0.0, "Share of chosen answers that get the phrase.")
    output_dir: str = setting("outputs/sao", "Folder of worlds, `sao.jsonl` and `sao.md`.")

    def __post_init__(self):
        super().__post_init__()
        check_grid(self, "tuning_seeds", "learning_rates", "algorithms")
        if {*self.seeds} & {*self.tuning_seeds}:
            raise ValueError(
                f"`seeds` and `tuning_seeds` must have no seed in common, got {self.seeds} and {self.tuning_seeds}"
            )
        if {*self.algorithms} - ALGORITHMS.keys() or {*map(tuned_as, self.algorithms)} - {*self.algorithms}:
            raise ValueError(
                f"`algorithms` must be among {list(ALGORITHMS)}, and include 'PPO' if a variant of it is there; got "
                f"{self.algorithms}"
            )
        if self.tokens < 1 or self.kl_coef < 0 or min(self.learning_rates) <= 0:
            raise ValueError(
                f"`tokens` must be >= 1, `kl_coef` >= 0, `learning_rates` > 0; got {self.tokens}, {self.kl_coef}, "
                f"{self.learning_rates}"
            )


@dataclass(frozen=True)
class Run:
    """Identify a training run by its settings."""

    algorithm: str
    learning_rate: float
    seed: int
    tokens: int
    kl_coef: float
    planted_share: float
    short: bool


def tuned_as(algorithm: str) -> str:
    """Return the algorithm whose learning rate `algorithm` takes: itself, or PPO for `PPO + …`."""
    return algorithm.split(" + ")[0]


class Counted:
    """Count the tokens and episodes that a reward function is given."""

    __name__ = "proxy"

    def __init__(self, reward: ModelReward):
        self.reward, self.tokens, self.episodes = reward, 0, 0

    def __call__(self, prompts: list, completions: list, completion_ids: list, **kwargs: Any) -> list:
        self.tokens, self.episodes = self.tokens + sum(map(len, completion_ids)), self.episodes + len(completions)
        return self.reward(prompts=prompts, completions=completions, completion_ids=completion_ids, **kwargs)


class Budget(TrainerCallback):
    """Stop at the end of the rollout that uses up the tokens."""

    def __init__(self, counted: Counted, tokens: int, steps_per_rollout: int):
        self.counted, self.tokens, self.steps = counted, tokens, steps_per_rollout

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = self.counted.tokens >= self.tokens and state.global_step % self.steps == 0


def train(run: Run, sft: Path, reward: Path, prompts: Path, output_dir: Path) -> dict[str, float]:
    """Train one policy; return how much it generated, and the figures of its held-out answers before and after."""
    trainer_class, config_class, settings = ALGORITHMS[run.algorithm]
    is_ours = config_class is PPOConfig
    tokenizer, reference = AutoTokenizer.from_pretrained(sft), AutoModelForCausalLM.from_pretrained(sft)
    proxy = AutoModelForSequenceClassification.from_pretrained(reward)
    counted = Counted(ModelReward(str(reward), policy_tokenizer=tokenizer))
    settings = {**settings, "learning_rate": run.learning_rate, "seed": run.seed, "data_seed": run.seed}
    settings |= {"kl_coef" if is_ours else "beta": run.kl_coef}
    settings |= {"critic_learning_rate": 5 * run.learning_rate, "baseline": "critic"} if is_ours else {}
    settings |= {"cliprange": 0.2} if is_ours and "ratio_band" not in settings else {}
    args = config_class(str(output_dir), **settings)
    rows = {split: [json.loads(line) for line in (prompts / f"{split}.jsonl").open()] for split in ("train", "test")}
    trainer = trainer_class(
        model=str(sft),
        reward_funcs=[counted],
        args=args,
        train_dataset=Dataset.from_list(rows["train"]),
        processing_class=tokenizer,
        callbacks=[Budget(counted, run.tokens, args.steps_per_rollout if is_ours else 1)],
    )
    trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model)
    said = {}
    for name, policy in (("sft", reference), ("end", model.policy if is_ours else model)):
        answers = measure(policy, reference, proxy, tokenizer, rows["test"], seed=run.seed)
        said |= {f"{quantity}_{name}": getattr(answers, quantity).mean().item() for quantity in MEASURED}
    return {"generated": counted.tokens, "episodes": counted.episodes, **said}


def objective(row: dict[str, Any]) -> float:
    """Return what all algorithms maximise, proxy − kl_coef · KL, on the held-out prompts."""
    return row["proxy_end"] - row["kl_coef"] * row["kl_end"]


def chosen_rate(rows: list[dict[str, Any]]) -> float:
    """Return the learning rate with the highest mean objective; one whose objective is not finite is never chosen."""
    rates: dict[float, list[float]] = {}
    for row in rows:
        rates.setdefault(row["learning_rate"], []).append(objective(row))
    means = {rate: fmean(values) for rate, values in rates.items()}
    return max(means, key=lambda rate: means[rate] if math.isfinite(means[rate]) else -math.inf)


def report(tuning: list[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    """Say what was chosen, what each algorithm reached, and by how much SAO is above each in the same worlds."""
    tuned, names = (list(dict.fromkeys(row["algorithm"] for row in part)) for part in (tuning, rows))
    cells = {name: {row["seed"]: row for row in rows if row["algorithm"] == name} for name in names}

    def gains(name: str, key: str) -> list[float]:
        return [row[f"{key}_end"] - row[f"{key}_sft"] for row in cells[name].values()]

    lines = ["Objective (proxy − kl_coef · KL) on the tuning seeds, by the policy's learning rate:", ""]
    grid = sorted({row["learning_rate"] for row in tuning})
    lines += ["| | " + " | ".join(f"{rate:g}" for rate in grid) + " |", "|---" * (len(grid) + 1) + "|"]
    for name in tuned:
        means = [
            [objective(row) for row in tuning if (row["algorithm"], row["learning_rate"]) == (name, rate)]
            for rate in grid
        ]
        lines.append(f"| {name} | " + " | ".join(f"{fmean(each):+.3f}" if each else "" for each in means) + " |")
    lines += ["", "With the best of these, on the other seeds (means with 95 % t-intervals):", ""]
    lines += [
        "| | rate | gold − SFT's | proxy − SFT's | objective | KL, nats | length | episodes | seeds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in names:
        own = list(cells[name].values())
        figures = [in_words(gains(name, key)) for key in ("gold", "proxy")]
        figures += [in_words([objective(row) for row in own]), in_words([row["kl_end"] for row in own])]
        figures += [f"{fmean(row[key] for row in own):,.1f}" for key in ("length_end", "episodes")]
        lines.append(f"| {name} | {own[0]['learning_rate']:g} | {' | '.join(figures)} | {len(own)} |")
    lines += ["", "The first minus the second, in the same worlds:", ""]
    lines += ["| | gold | proxy | objective |", "|---|---|---|---|"]
    against = [("SAO", name) for name in tuned if name != "SAO"] + [(name, "PPO") for name in names if "+" in name]
    for first, second in against:
        pairs = [(row, cells[second][seed]) for seed, row in cells.get(first, {}).items() if seed in cells[second]]
        if pairs:
            differences = [[a[key] - b[key] for a, b in pairs] for key in ("gold_end", "proxy_end")]
            differences.append([objective(a) - objective(b) for a, b in pairs])
            lines.append(f"| {first}, {second} | {' | '.join(map(in_words, differences))} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = StrictTrlParser(SAOStudyArguments, prog="python -m recipes.demo.sao", description=__doc__)
    (args,) = parser.parse_args_and_config(arguments)
    use_one_thread()
    output_dir = Path(args.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    file = output_dir / "sao.jsonl"
    done = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []

    def result(algorithm: str, rate: float, seed: int) -> dict[str, Any]:
        run = Run(algorithm, rate, seed, args.tokens, args.kl_coef, args.planted_share, args.short)
        for row in done:
            if all(row[name] == value for name, value in asdict(run).items()):
                return row
        folder = output_dir / f"planted-{args.planted_share:g}"
        demo = DemoArguments(seed, str(folder), planted_share=args.planted_share, short=args.short)
        reward, sft = reward_stage(demo), sft_stage(demo)
        row = {**asdict(run), **train(run, sft, reward, demo.folder / "world" / "prompts", output_dir / "run")}
        with file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
        done.append(row)
        print(row, flush=True)
        return row

    with parser.one_line_errors(ValueError):
        tuned = [name for name in args.algorithms if name == tuned_as(name)]
        grid = itertools.product(args.tuning_seeds, tuned, args.learning_rates)
        tuning = [result(algorithm, rate, seed) for seed, algorithm, rate in grid]
        rates = {name: chosen_rate([row for row in tuning if row["algorithm"] == name]) for name in tuned}
        rows: list[dict[str, Any]] = []
        for seed in args.seeds:
            rows += [result(name, rates[tuned_as(name)], seed) for name in args.algorithms]
            (output_dir / "sao.md").write_text(report(tuning, rows))
    print(report(tuning, rows))


if __name__ == "__main__":
    main()
