"""
Each shipped recipe for a real model is parsed as its script does, and takes two steps on CPU, with a tiny model of the
same architecture, local rows of the same format, and float32 in place of bfloat16.
"""

import functools
import importlib
import json
from pathlib import Path

import pytest
import torch
from trl import ModelConfig

from recipes.dpo import DPOScriptArguments
from recipes.hh_rlhf import split_pair
from recipes.ppo import PPOScriptArguments
from recipes.pretrain_critic import CriticScriptArguments
from recipes.reward import RewardScriptArguments
from recipes.sft import SFTScriptArguments
from tests.recipes.real_models import SHAPES, tiny_of, tokenizer_of
from tests.tiny import WORDS
from trl_ext import DPOConfig, PPOConfig, StrictTrlParser
from trl_ext.dpo import RewardConfig, SFTConfig
from trl_ext.ppo import CriticConfig

ROOT = Path(__file__).parents[2]
FOLDERS = ("qwen2.5-0.5b", "qwen2.5-1.5b", "llama-3.1-8b", "llama-3.1-70b")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / "recipes" / folder).glob("*.yaml"))
CLASSES = {
    "sft": (SFTScriptArguments, SFTConfig),
    "reward": (RewardScriptArguments, RewardConfig),
    "ppo": (PPOScriptArguments, PPOConfig),
    "dpo": (DPOScriptArguments, DPOConfig),
    "pretrain_critic": (CriticScriptArguments, CriticConfig),
}


def stage_of(path):
    return next(stage for stage in CLASSES if path.stem.startswith(stage))


def parse(path, *more):
    parser = StrictTrlParser((*CLASSES[stage_of(path)], ModelConfig))
    return parser.parse_args_and_config(["--config", str(path), "--use_cpu", "true", "--bf16", "false", *more])


def base_of(path, name):
    """Return the hub name of the model that led to `name`, a hub name or an output."""
    produced = {}
    for other in FILES:
        lines = dict(
            line.split(": ", 1) for line in other.read_text().splitlines() if line[:1].isalpha() and ": " in line
        )
        produced[lines["output_dir"]] = lines["model_name_or_path"]
    while name.startswith("outputs/"):
        name = produced[name.removesuffix("/merged")]
    return name


# ---- The files ----


def test_a_recipe_parses_strictly_and_another_one_makes_its_inputs(subtests):
    for path in FILES:
        with subtests.test(path=path):
            script_args, training_args, model_args = parse(path)
            stage, folder = stage_of(path), f"outputs/{path.parent.name}"
            assert training_args.output_dir == f"{folder}/{path.stem}"
            assert base_of(path, model_args.model_name_or_path) in SHAPES
            if stage == "ppo":
                assert base_of(path, script_args.reward_model_name_or_path) in SHAPES


# ---- Two steps ----


@pytest.fixture(scope="module")
def standins(tmp_path_factory):
    """A function that saves a model, and the folder of the data sets."""
    folder = tmp_path_factory.mktemp("standins")

    @functools.cache
    def model(name, num_labels=None):
        torch.manual_seed(0)
        target = folder / f"{name.replace('/', '--')}-{num_labels}"
        own = tokenizer_of(name)
        tiny_of(name, len(own), num_labels).save_pretrained(target)
        own.save_pretrained(target)
        return str(target)

    text = [{"prompt": " ".join(WORDS[i : i + 4]), "completion": f" {WORDS[i + 4]}"} for i in range(16)]
    pairs = [{"prompt": r["prompt"], "chosen": r["completion"], "rejected": " the the"} for r in text]
    hh = [
        split_pair(*(f"\n\nHuman: {row['prompt']}\n\nAssistant: {row[name]}" for name in ("chosen", "rejected")))
        for row in pairs
    ]
    data = {
        "trl-lib/tldr": text,
        "trl-lib/tldr-preference": pairs,
        "trl-lib/ultrafeedback_binarized": [
            {**{name: [*row["prompt"], *row[name]] for name in ("chosen", "rejected")}, "score_chosen": 8.0}
            for row in hh
        ],
        "data/hh-rlhf/preference": hh,
        "data/hh-rlhf/sft": [{"prompt": row["prompt"], "completion": row["chosen"]} for row in hh],
        "data/hh-rlhf/prompts": [{"prompt": row["prompt"]} for row in hh],
    }
    for name, rows in data.items():
        (folder / name).mkdir(parents=True)
        for split, begin in (("train", 0), ("validation", 1), ("test", 1)):  # held-out rows are not trained on
            (folder / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[begin::2]))
    rollouts = folder / "outputs/qwen2.5-0.5b/rollouts.jsonl"
    rollouts.parent.mkdir(parents=True)
    own = tokenizer_of("Qwen/Qwen2.5-0.5B")
    ids = [{f"{name}_ids": own(row[name])["input_ids"] for name in ("prompt", "completion")} for row in text]
    rollouts.write_text("".join(json.dumps({**row, **each}) + "\n" for row, each in zip(text, ids, strict=True)))
    return model, folder


def others(path):
    """The recipes that differ from another one only in sizes."""
    return path.parent.name == FOLDERS[1] or path.stem.endswith(("_full", "_two_nodes", "_lora"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=f"{path.parent.name}/{path.stem}", marks=pytest.mark.extra if others(path) else ())
        for path in FILES
        if "vllm" not in path.stem  # tests/vllm covers the server
    ],
)
def test_two_steps(path, standins, tmp_path):
    model, folder = standins
    stage = stage_of(path)
    script_args, training_args, model_args = parse(path)
    quantized = model_args.load_in_4bit
    name = base_of(path, model_args.model_name_or_path)
    flags = {
        "model_name_or_path": model(name),
        "dataset_name": str(folder / script_args.dataset_name),
        "output_dir": str(tmp_path / "out"),
        "use_cpu": "true",
        "bf16": "true" if quantized else "false",
        "dtype": "float32",
        "max_steps": "2",
        "per_device_train_batch_size": "2",
        "gradient_accumulation_steps": "2",
        "per_device_eval_batch_size": "4",
        "logging_steps": "1",
        "warmup_steps": "0",
        "disable_tqdm": "true",
        "dataloader_pin_memory": "false",
        "record_run": "false",
    }
    if stage in ("sft", "dpo"):
        flags["record_answers"] = "0"
    if stage == "pretrain_critic":
        flags |= {"policy_name_or_path": model(name), "model_name_or_path": model(name, 1), "eval_size": "2"}
        flags |= {"reward_model_name_or_path": model(name, 1)}
    if stage == "ppo":
        reward = base_of(path, script_args.reward_model_name_or_path)
        flags |= {"reward_model_name_or_path": model(reward, 1), "max_completion_length": "4"}
        flags |= {"num_mini_batches": "1", "local_rollout_forward_batch_size": "4"}
        flags |= {"total_episodes": str(2 * 4 // training_args.num_ppo_epochs)}  # the two steps
    arguments = ["--config", str(path), *(part for flag, value in flags.items() for part in (f"--{flag}", value))]
    importlib.import_module(f"recipes.{stage}").main(arguments)

    out = tmp_path / "out"
    state = json.loads((out / "checkpoint-2/trainer_state.json").read_text())
    assert (out / ("adapter_model.safetensors" if model_args.use_peft else "model.safetensors")).exists()
    assert state["global_step"] == 2
