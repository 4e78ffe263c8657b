"""
What LoRA PPO learns beside full-parameter PPO: the demo's guarded run, both from the same SFT and reward model.

    python tests/benchmarks/lora_learning.py --parts sweep why compare joint

`sweep` tries other rates and ranks on seed 0. `why` trains on seed 0 what the defaults are an answer to: all
weights but the LM head, and adapters without the final norm. `compare` trains the defaults of
`recipes/demo/ppo_lora.yaml` and of `recipes/demo/guarded.yaml` on each seed; `joint` lets the critic read the actor's
own adapter instead of one of its own. Runs are made one after another on one thread, some minutes each, and a finished
one is kept as JSON: the same command goes on where it stopped.

Gains are those of four answers to each of 256 held-out prompts over the SFT model's, at temperature 1. The ratio's
interval is a bootstrap over prompts; how far training seeds differ is seen from the seeds' own ratios.
"""

import argparse
import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch
import yaml
from peft import AutoPeftModelForCausalLM
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

if os.getcwd() not in sys.path:  # a script's own folder is there instead
    sys.path.insert(0, os.getcwd())

from recipes.demo.measure import measure
from recipes.demo.stages import HERE, DemoArguments, ppo_stage, reward_stage, seconds, use_one_thread
from trl_ext import load_dataset_split
from trl_ext.evaluation import bootstrap_interval
from trl_ext.models.actor_critic import ActorCritic
from trl_ext.models.adapter_switch import POLICY
from trl_ext.ppo.roles import make_actor_critic

KINDS = ("gold", "proxy")
CURVES = {"value_loss": "loss/value_avg", "explained_variance": "val/explained_variance"}
DRAWS = 4  # answers per prompt
PLAIN = {"use_peft": True, "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "lora_target_modules": "all-linear"}
SWEEP = [
    {},
    {"learning_rate": 3.0e-3},
    {"learning_rate": 1.2e-2},
    {"critic_learning_rate": 2.0e-2},
    {"lora_r": 4, "lora_alpha": 1},
    {"critic_learning_rate": 2.0e-3},
]


# Variant: how it changes the module of actor and critic
VARIANTS: dict[str, Callable[[ActorCritic], object]] = {
    # Both losses train the policy's adapter at `learning_rate`; the head is as ever
    "joint adapter": lambda actor_critic: setattr(actor_critic.critic, "name", POLICY),
    # As adapters must, it leaves the LM head alone
    "frozen LM head": lambda actor_critic: actor_critic.policy.get_output_embeddings().requires_grad_(False),
}


def varied(variant: str) -> contextlib.AbstractContextManager:
    """Have trainers make this variant of actor and critic; the one of every run if `variant` is empty."""

    def make(*args):
        actor_critic, origin = make_actor_critic(*args)
        VARIANTS[variant](actor_critic)
        return actor_critic, origin

    return mock.patch("trl_ext.ppo.trainer.make_actor_critic", make) if variant else contextlib.nullcontext()


@dataclass(frozen=True)
class Run:
    config: str  # `guarded` or `ppo_lora`
    seed: int
    options: dict = field(default_factory=dict)
    variant: str = ""

    @property
    def settings(self) -> dict:
        return yaml.safe_load((HERE / f"{self.config}.yaml").read_text()) | self.options

    @property
    def name(self) -> str:
        digest = hashlib.sha256(json.dumps([self.settings, self.variant], sort_keys=True).encode()).hexdigest()
        return f"{self.config}-{digest[:8]}"

    @property
    def label(self) -> str:
        if not self.settings.get("use_peft"):
            return ", ".join(["full", f"learning rates {self._rates}", *filter(None, [self.variant])])
        adapter = f"r {self.settings['lora_r']}, alpha {self.settings['lora_alpha']}, learning rates {self._rates}"
        extra = [*(self.settings.get("lora_modules_to_save") or ["no norm"]), *filter(None, [self.variant])]
        return ", ".join(["LoRA", adapter, *extra])

    @property
    def _rates(self) -> str:
        return f"{self.settings['learning_rate']:g} and {self.settings['critic_learning_rate']:g}"


def scores(folder: Path, demo: Path, seed: int, is_adapter: bool = False) -> dict[str, list[float]]:
    """Per held-out prompt, the mean gold and proxy score and KL of `DRAWS` sampled answers."""
    load = AutoPeftModelForCausalLM if is_adapter else AutoModelForCausalLM
    policy = load.from_pretrained(folder)
    policy = policy.merge_and_unload() if is_adapter else policy
    reference = AutoModelForCausalLM.from_pretrained(demo / "sft")
    reward_model = AutoModelForSequenceClassification.from_pretrained(demo / "reward", num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(demo / "sft")
    rows = load_dataset_split(demo / "world" / "prompts", "test").to_list()
    draws = [measure(policy, reference, reward_model, tokenizer, rows, DRAWS * seed + i) for i in range(DRAWS)]
    return {name: torch.stack([getattr(draw, name) for draw in draws]).mean(0).tolist() for name in (*KINDS, "kl")}


def curves(folder: Path) -> dict[str, list[float]]:
    """What the critic's fit was at every rollout of a run."""
    states = folder.glob("checkpoint-*/trainer_state.json")
    newest = max(states, key=lambda path: int(path.parent.name.split("-")[1]))
    logs = {log["step"]: log for log in json.loads(newest.read_text())["log_history"] if CURVES["value_loss"] in log}
    return {name: [logs[step].get(key, 0.0) for step in sorted(logs)] for name, key in CURVES.items()}


def cached(path: Path, make) -> dict:
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".tmp").write_text(json.dumps(make()))
        path.with_suffix(".tmp").replace(path)
    return json.loads(path.read_text())


def train(run: Run, output_dir: str) -> dict:
    """The run's gains over SFT, a number a prompt, and its curves."""
    demo = DemoArguments(seed=run.seed, output_dir=output_dir)
    results = demo.folder / "results"

    def before() -> dict:
        with contextlib.redirect_stdout(sys.stderr):
            reward_stage(demo)
        return scores(demo.folder / "sft", demo.folder, run.seed)

    def after() -> dict:
        options = [part for key, value in run.options.items() for part in (f"--{key}", value)]
        with varied(run.variant), contextlib.redirect_stdout(sys.stderr):
            folder = ppo_stage(demo, run.name, options)
        end = scores(folder, demo.folder, run.seed, is_adapter=run.settings.get("use_peft", False))
        return {"label": run.label, "settings": run.settings, "end": end, **curves(folder), "seconds": seconds(folder)}

    start, result = cached(results / "sft.json", before), cached(results / f"{run.name}.json", after)
    gains = {f"{kind}_gain": torch.tensor(result["end"][kind]) - torch.tensor(start[kind]) for kind in KINDS}
    print(row(run, result | gains), flush=True)
    return result | gains


def row(run: Run, result: dict) -> str:
    """Of the curves: the mean of the first and of the last eighth of the rollouts."""
    cells = [run.label, str(run.seed)]
    cells += [f"{result[f'{kind}_gain'].mean():+.3f}" for kind in KINDS]
    cells.append(f"{sum(result['end']['kl']) / len(result['end']['kl']):.2f}")
    for name in CURVES:
        values, part = result[name], max(len(result[name]) // 8, 1)
        cells.append(f"{sum(values[:part]) / part:.3f} → {sum(values[-part:]) / part:.3f}")
    return f"| {' | '.join([*cells, format(result['seconds'], '.0f')])} |"


COLUMNS = ["run", "seed", "gold gain", "proxy gain", "KL", "value loss", "explained variance", "s"]


def ratio(values: Tensor) -> Tensor:
    """(…, N, 2) → (…): the first column's mean over the second's."""
    mean = values.mean(-2)
    return mean[..., 0] / mean[..., 1]


def compare(ours: list[dict], theirs: list[dict], title: str) -> None:
    """The ratio of mean gains over all seeds' prompts, its interval, and each seed's own ratio."""
    for kind in KINDS:
        pairs = [
            torch.stack([a[f"{kind}_gain"], b[f"{kind}_gain"]], dim=1).double()
            for a, b in zip(ours, theirs, strict=True)
        ]
        pooled = torch.cat(pairs)
        low, high = bootstrap_interval(pooled, ratio)
        seeds = ", ".join(f"{ratio(pair):.2f}" for pair in pairs)
        print(f"{title}, {kind}: ratio of gains {ratio(pooled):.2f} ({low:.2f} to {high:.2f}); by seed {seeds}")


def plot(groups: dict[str, list[dict]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axes, name in zip(panels, CURVES, strict=True):
        for index, (label, results) in enumerate(groups.items()):
            for number, result in enumerate(results):
                axes.plot(result[name], color=f"C{index}", alpha=0.7, label=label if number == 0 else None)
        axes.set(xlabel="rollout", title=name.replace("_", " "))
        axes.grid(alpha=0.3)
    panels[0].legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("sweep", "why", "compare", "joint")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of `compare`")
    parser.add_argument("--joint_seeds", nargs="+", type=int, default=[0, 1], help="of `joint`")
    parser.add_argument("--output_dir", default="outputs/lora_learning")
    args = parser.parse_args()
    use_one_thread()
    output_dir = Path(args.output_dir)
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
    if "sweep" in args.parts:
        for options in SWEEP:
            train(Run("ppo_lora", 0, options), args.output_dir)
        train(Run("guarded", 0, {"learning_rate": 4.0e-4}), args.output_dir)
    if "why" in args.parts:
        train(Run("guarded", 0, variant="frozen LM head"), args.output_dir)
        train(Run("guarded", 0, {**PLAIN, "learning_rate": 1.0e-3, "critic_learning_rate": 2.0e-3}), args.output_dir)
    if "compare" in args.parts:
        full = [train(Run("guarded", seed), args.output_dir) for seed in args.seeds]
        lora = [train(Run("ppo_lora", seed), args.output_dir) for seed in args.seeds]
        compare(lora, full, "LoRA / full")
        plot({"LoRA": lora, "full": full}, output_dir / "critics.png")
    if "joint" in args.parts:
        separate = [train(Run("ppo_lora", seed), args.output_dir) for seed in args.joint_seeds]
        joint = [train(Run("ppo_lora", seed, variant="joint adapter"), args.output_dir) for seed in args.joint_seeds]
        compare(joint, separate, "joint / separate")


if __name__ == "__main__":
    main()
