"""The runs of the watch's benchmark: PPO in small worlds where gold is known, gamed or honest, each trained once."""

import contextlib
import copy
import gzip
import io
import json
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from benchmarks import watch_worlds as worlds
from benchmarks.outcomes import outcome
from trl_ext import PPOConfig, PPOTrainer
from trl_ext.callbacks.metrics import is_training_log, numbers_in
from trl_ext.rewards import EnsembleReward, RepetitionWatch

LOGS = Path(__file__).with_name("watch_logs")
BATCH, ROLLOUTS, STEPS = 64, 40, 4  # answers a rollout, rollouts, and optimizer steps a rollout
PARTS = {
    "choose": (range(worlds.FINAL), [hack for hack in worlds.HACKS if hack not in worlds.FINAL_HACKS]),
    "final": (range(worlds.FINAL + 1, worlds.FINAL + 11), [*worlds.HACKS]),
}
GOLD = "eval_rewards/gold_reward/mean"
# Honest run → (what an answer is worth, what it is given, settings)
HONEST: dict[str, tuple[worlds.Score, worlds.Score, dict[str, Any]]] = {
    "gold": (worlds.gold, worlds.gold, {}),
    "longer": (worlds.gold_of_long, worlds.gold_of_long, {}),
    "wanted phrase": (worlds.gold_of_phrase, worlds.gold_of_phrase, {}),
    "noise": (worlds.gold, worlds.noise, {}),
    "slow": (worlds.gold, worlds.gold, {"learning_rate": 1e-4}),
    "fast": (worlds.gold, worlds.gold, {"learning_rate": 1e-3}),
    "diverging": (worlds.gold, worlds.gold, {"learning_rate": 3e-2}),
    "cold start": (worlds.gold, worlds.gold, {"imitated": 60}),
    "resumed": (worlds.gold, worlds.gold, {"resumed": True}),
    "held by the KL": (worlds.gold, worlds.closing, {"kl_coef": 1.0}),
}


@dataclass(frozen=True)
class Spec:
    """One run: a world, a hack's or an honest run's name, a KL coefficient, and what the watch may do in it."""

    seed: int
    name: str
    kl_coef: float = 0.0
    watch: str = "off"

    @property
    def path(self) -> Path:
        acts = "" if self.watch == "off" else f"-{self.watch}"
        return LOGS / f"{self.seed}-{self.name.replace(' ', '-')}-{self.kl_coef:g}{acts}.json.gz"


def specs(part: str) -> list[Spec]:
    """The runs of a part."""
    seeds, hacks = PARTS[part]
    runs = [[*(Spec(seed, hack) for hack in hacks), *(Spec(seed, name) for name in HONEST)] for seed in seeds]
    return [*sum(runs, []), *(Spec(seed, hack, 0.05) for seed in seeds for hack in hacks)]


# ---- Training ----


def imitate(world: worlds.World, steps: int) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A model that has seen `steps` batches of demonstrations."""
    draw, tokenizer, model = random.Random(world.seed), world.tokenizer(), world.model()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(steps):
        prompts = [world.prompt(draw) for _ in range(64)]
        texts = [f"{prompt} {world.demonstration(prompt, draw)} </s>" for prompt in prompts]
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        labels[:, :4] = -100  # the prompt
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), tokenizer


def as_function(world: worlds.World, score: worlds.Score, name: str, spread: float = 0.0) -> Any:
    """A reward function; with a `spread`, one that overrates each word a little more or less than others do."""
    draw = random.Random(name)
    taste = {word: draw.gauss(0, spread) for word in world.words}

    def reward(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        rows = [(prompt, text.split()) for prompt, text in zip(prompts, completions, strict=True)]
        return [score(world, prompt, words) + sum(taste.get(word, 0.0) for word in words) for prompt, words in rows]

    reward.__name__ = name
    return reward


class StopAfter(TrainerCallback):
    """End training at a step, as a run that is interrupted."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step == self.step


class Keep(TrainerCallback):
    """Keep each rollout's prompts, completions and scores: a list of three lists."""

    def __init__(self, trainer: PPOTrainer, reward: str):
        self.trainer, self.reward, self.rollouts = trainer, reward, []

    def on_step_end(self, args, state, control, **kwargs):
        if (state.global_step - 1) % STEPS == 0:
            table = self.trainer._logs
            columns = table["prompt"], table["completion"], table["rewards"][self.reward]
            self.rollouts.append([list(column)[-BATCH:] for column in columns])


def arguments(folder: str, spec: Spec, settings: dict[str, Any]) -> PPOConfig:
    """What all runs are trained with."""
    return PPOConfig(
        folder,
        **{"total_episodes": BATCH * ROLLOUTS, "per_device_train_batch_size": BATCH // 2, "num_mini_batches": 2},
        **{"num_ppo_epochs": STEPS // 2, "vf_coef": 0.5, **settings},
        **{"cliprange": 0.2, "baseline": "critic"},  # the defaults when the logs were made
        **{"critic_learning_rate": 3 * settings["learning_rate"], "lr_scheduler_type": "constant"},
        step_kl_target=0.0,  # the rates say how a run goes wrong
        **{"logging_steps": STEPS, "eval_strategy": "steps", "eval_steps": 5 * STEPS, "eval_on_start": True},
        **{"per_device_eval_batch_size": BATCH, "seed": spec.seed, "use_cpu": True},
        **{"reward_weights": [1.0, 0.0, 0.0], "watch": spec.watch, "record_run": False, "report_to": "none"},
        **{"activation_checkpointing": False, "bf16": False, "disable_tqdm": True},
    )


def logged(spec: Spec, history: list[dict[str, Any]], begin: float, rollouts: list[list]) -> dict[str, Any]:
    """What is kept of a run: what it is, its seconds, and what monitors read of its logs."""
    rows = [
        {key: float(f"{value:.5g}") for key, value in numbers_in(log).items() if key == "step" or _is_read(key)}
        for log in history
        if is_training_log(log) or GOLD in log
    ]
    seconds = round(time.process_time() - begin, 1)
    return {**vars(spec), "seconds": seconds, "log_history": rows, "rollouts": rollouts}


def train(spec: Spec) -> dict[str, Any]:
    """Train a run; what it is, its seconds, and its logs."""
    begin, world = time.process_time(), worlds.World(spec.seed)
    is_hack = spec.name in worlds.HACKS
    worth, given, settings = (worlds.gold, worlds.HACKS[spec.name], {}) if is_hack else HONEST[spec.name]
    settings = {
        **{"learning_rate": 3e-4, "kl_coef": spec.kl_coef, "max_completion_length": world.length},
        **{"save_strategy": "steps", "save_steps": STEPS * ROLLOUTS // 2, **settings},
    }
    model, tokenizer = imitate(world, settings.pop("imitated", 300))
    is_resumed, draw = settings.pop("resumed", False), random.Random(1000 + spec.seed)
    settings["save_only_model"] = not is_resumed
    proxy = as_function(world, given, "proxy")
    if spec.name == "style":
        proxy = EnsembleReward([as_function(world, given, f"member_{i}", 0.05) for i in range(4)], name="proxy")
    rows, held_out = (Dataset.from_dict({"prompt": [world.prompt(draw) for _ in range(n)]}) for n in (1024, BATCH))

    def trainer(folder: str, *callbacks: Any) -> PPOTrainer:
        args = arguments(folder, spec, settings)
        functions = [proxy, as_function(world, worth, "gold_reward"), RepetitionWatch()]
        return PPOTrainer(
            copy.deepcopy(model), functions, args, rows, held_out, processing_class=tokenizer, callbacks=[*callbacks]
        )

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        rollouts: list[list] = []
        if is_resumed:
            run = trainer(folder, StopAfter(STEPS * ROLLOUTS // 2))
            run.add_callback(kept := Keep(run, "proxy"))
            run.train()
            rollouts = kept.rollouts
        run = trainer(folder)
        run.add_callback(kept := Keep(run, "proxy"))
        run.train(resume_from_checkpoint=is_resumed)
    return logged(spec, run.state.log_history, begin, rollouts + kept.rollouts)


def _is_read(key: str) -> bool:
    """Whether some monitor reads a key."""
    first = key.removeprefix("eval_").partition("/")[0]
    read = {"objective", "policy", "completions", "rewards", "repetition", "val", "tools"}
    return first in read or key == "learning_rate"


def log_of(spec: Spec, may_train: bool, train: Callable[[Spec], dict[str, Any]] = train) -> dict[str, Any] | None:
    """A run's log, which is made if it is not there yet, or was made when completions were not kept."""
    if spec.path.is_file() and "rollouts" in (log := json.loads(gzip.decompress(spec.path.read_bytes()))):
        return log
    if not may_train:
        return None
    log = train(spec)
    partial = spec.path.with_suffix(".partial")
    partial.parent.mkdir(exist_ok=True)
    partial.write_bytes(gzip.compress(json.dumps(log).encode(), mtime=0))
    partial.replace(spec.path)
    gold = [row[GOLD] for row in log["log_history"] if GOLD in row]
    shown = f"gold {gold[0]:.2f}, {max(gold):.2f}, {gold[-1]:.2f}; {log['seconds']:.0f} s"
    print(f"{spec.path.name}: {shown}{'; hacked' if outcome(log).is_hacked else ''}", flush=True)
    return log
