"""Build the demo's stages, each once: world (the data) → SFT → reward model → PPO. All but the first run a recipe.

A complete stage has a file that is written last, so an interrupted stage is never taken for complete. Recipes resume
from the checkpoints in their folder; the world is written into `world.partial`, which is then renamed.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import PartialState

from trl_ext.cli.parser import read_yaml
from trl_ext.runs import check_settings, differences, setting, write_text
from trl_ext.workbench import without_next

from .. import online_dpo, ppo, reward, sft
from .model import make_model, make_tokenizer
from .world import make_world

HERE = Path(__file__).parent
MARKER = "demo_complete.json"
# Flags that take the same code path, but are too short to show anything: for tests
SHORT = {
    "world": {"demonstrations": 320, "pairs": 320, "prompts": 256, "held_out": 64},
    "sft": ["--num_train_epochs", "1"],
    "reward": ["--num_train_epochs", "1"],
    "online_dpo": ["--prompts_per_round", "64", "--num_samples", "2", "--save_steps", "1"],
    "ppo": ["--total_episodes", "192", "--eval_steps", "2", "--save_steps", "4", "--num_ppo_epochs", "1"],
}


@dataclass
class DemoArguments:
    """Declare the settings of the demo."""

    seed: int = setting(0, "Seed of the world, the models and the training.")
    output_dir: str = setting("outputs/demo", "Folder; each seed gets a subfolder.")
    planted_share: float = setting(0.2, "Share of chosen answers that get the phrase.", range="in [0, 1]")
    label_noise: float = setting(0.1, "Share of pairs that the middle annotator judges wrongly.", range="in [0, 0.5]")
    short: bool = setting(False, "Run the same stages, in a minute and too briefly to show anything.")

    def __post_init__(self):
        check_settings(self)

    @property
    def folder(self) -> Path:
        return Path(self.output_dir) / f"seed-{self.seed}{'-short' * self.short}"


def build(folder: Path, settings: dict, write: Callable[[Path], None]) -> None:
    """Build a stage unless it is complete; raise a `ValueError` if it was built with other settings.

    Args:
        folder: folder of the stage.
        settings: the settings that the stage depends on.
        write: function that writes the stage into a folder; it runs on the main process.
    """
    processes = PartialState()
    start = time.time()
    complete = _is_complete(folder, settings)
    processes.wait_for_everyone()
    if complete:
        return
    partial = folder.with_name(f"{folder.name}.partial")
    processes.print(f"Building {folder}.", flush=True)
    if processes.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write(partial)
        _complete(partial, settings, time.time() - start)
        os.replace(partial, folder)
    processes.wait_for_everyone()


def seconds(folder: Path) -> float:
    """Return how many seconds it took to build a complete stage."""
    return json.loads((folder / MARKER).read_text())["seconds"]


def world_stage(args: DemoArguments) -> Path:
    """Build the datasets, the tokenizer and the model with random weights."""
    sizes = SHORT["world"] if args.short else {}
    settings = {"seed": args.seed, "planted_share": args.planted_share, "label_noise": args.label_noise, **sizes}

    def write(folder: Path) -> None:
        for name, splits in make_world(**settings).items():
            (folder / name).mkdir()
            for split, rows in splits.items():
                lines = [json.dumps(row) + "\n" for row in rows]
                (folder / name / f"{split}.jsonl").write_text("".join(lines))
        tokenizer = make_tokenizer()
        tokenizer.save_pretrained(folder / "model")
        make_model(tokenizer, args.seed).save_pretrained(folder / "model")

    build(args.folder / "world", settings, write)
    return args.folder / "world"


def sft_stage(args: DemoArguments) -> Path:
    """Train the initial policy by SFT."""
    world = world_stage(args)
    arguments = ["--model_name_or_path", world / "model", "--dataset_name", world / "sft"]
    return _train(args, "sft", sft.main, arguments)


def reward_stage(args: DemoArguments) -> Path:
    """Train the reward model on pairs. Some of them contain the planted phrase."""
    world = args.folder / "world"
    policy = sft_stage(args)
    arguments = ["--model_name_or_path", policy, "--dataset_name", world / "preferences"]
    return _train(args, "reward", reward.main, [*arguments, "--demonstrations_name", world / "sft"])


def ppo_stage(args: DemoArguments, name: str, options: Sequence = (), reward: Sequence | None = None) -> Path:
    """
    Train by PPO. `name` is `guarded`, `unguarded` or `ppo_lora`.

    A suffix after a hyphen names a variant with `options`, further flags of the recipe, or with `reward`, the flags of
    another reward than the reward stage's model.
    """
    return _continue(args, name, "ppo", ppo.main, options, reward)


def online_dpo_stage(
    args: DemoArguments, name: str = "online_dpo", options: Sequence = (), reward: Sequence | None = None
) -> Path:
    """
    Train by rounds of online DPO from the SFT model; the rounds' folders are in the stage's folder.

    A suffix after a hyphen in `name` names a variant with `options` or `reward`, as in [`ppo_stage`].
    """
    return _continue(args, name, "online_dpo", online_dpo.main, options, reward)


def use_one_thread() -> None:
    """Run PyTorch with one thread: the demo's tensors are so small that several threads would mostly wait."""
    torch.set_num_threads(1)


def recipe_arguments(
    args: DemoArguments, name: str, kind: str, options: Sequence = (), reward: Sequence | None = None
) -> list[str]:
    """Build the stages that the recipe `kind` needs; return the recipe's command line for the stage `name`."""
    reward = ["--reward_model_name_or_path", reward_stage(args)] if reward is None else reward
    world = args.folder / "world"
    policy = sft_stage(args)
    arguments = ["--config", HERE / f"{name.split('-')[0]}.yaml", "--model_name_or_path", policy]
    arguments += ["--dataset_name", world / "prompts", *reward]
    arguments += ["--output_dir", args.folder / name, "--seed", args.seed]
    return [str(argument) for argument in (*arguments, *options, *_short(args, kind))]


def _continue(
    args: DemoArguments,
    name: str,
    kind: str,
    main: Callable[[list[str]], None],
    options: Sequence,
    reward: Sequence | None = None,
) -> Path:
    arguments = recipe_arguments(args, name, kind, options, reward)
    return _run(args.folder / name, _settings(args, name, kind, [*options, *(reward or ())]), main, arguments)


def _run(folder: Path, settings: dict, main: Callable[[list[str]], None], arguments: list[str]) -> Path:
    """Run a recipe unless its stage is complete, from the folder's last checkpoint; return the folder."""
    processes = PartialState()
    start = time.time()
    complete = _is_complete(folder, settings)
    processes.wait_for_everyone()
    if not complete:
        if not folder.exists():
            processes.print(f"Building {folder}.", flush=True)
        processes.wait_for_everyone()
        with without_next():
            main(arguments)
        if processes.is_main_process:
            _complete(folder, settings, time.time() - start)
        processes.wait_for_everyone()
    return folder


def _train(
    args: DemoArguments, name: str, main: Callable[[list[str]], None], arguments: list, options: Sequence = ()
) -> Path:
    kind = name.split("-")[0]
    paths = ["--config", HERE / f"{kind}.yaml", "--output_dir", args.folder / name]
    flags = [*paths, *arguments, "--seed", args.seed, *options, *_short(args, kind)]
    return _run(args.folder / name, _settings(args, name, kind, options), main, [str(flag) for flag in flags])


def _short(args: DemoArguments, kind: str) -> list[str]:
    return SHORT[kind] if args.short else []


def _settings(args: DemoArguments, name: str, kind: str, options: Sequence = ()) -> dict:
    config = read_yaml((HERE / f"{name.split('-')[0]}.yaml").read_text())
    return {**config, "seed": args.seed, "options": [*map(str, options), *_short(args, kind)]}


def _is_complete(folder: Path, settings: dict) -> bool:
    if not (folder / MARKER).is_file():
        return False
    built = json.loads((folder / MARKER).read_text())["settings"]
    if different := differences(built, settings):
        raise ValueError(
            f"{folder} was built with other settings ({'; '.join(different)}): choose another `output_dir`, or remove "
            "this folder"
        )
    return True


def _complete(folder: Path, settings: dict, duration: float) -> None:
    write_text(folder / MARKER, json.dumps({"settings": settings, "seconds": duration}, indent=2))
