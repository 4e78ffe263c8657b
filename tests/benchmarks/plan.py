"""Compare the planned peak of memory with the real one, on CPU, and write docs/plan.md.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.plan

Each configuration trains two optimizer steps of a small model (23M parameters) in a process of its own, after a
warm-up with a tiny one, so that what libraries import is not counted. Measured is the peak of resident memory above
that before the models.
"""

import gc
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DebertaV2Config,
    LlamaConfig,
)
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from tests.tiny import tiny_tokenizer
from trl_ext import PPOConfig, PPOTrainer
from trl_ext.workbench.planning import Job, plan

ROOT = Path(__file__).parents[2]
# As wide as TRL's tile of logits: of a wider tile the rest would be reserved, and never resident
VOCABULARY, LENGTH = 32768, 128
WORDS = [f"w{i}" for i in range(VOCABULARY - 6)]
CONFIGS = {"sft": SFTConfig, "reward": RewardConfig, "dpo": DPOConfig, "ppo": PPOConfig}
SETTINGS = {  # stage, adapter, arguments
    "sft": ("sft", False, {}),
    "sft, checkpointing": ("sft", False, {"activation_checkpointing": True, "per_device_train_batch_size": 8}),
    "sft, 2 accumulated": ("sft", False, {"gradient_accumulation_steps": 2}),
    "sft, bf16": ("sft", False, {"bf16": True}),
    "sft, LoRA": ("sft", True, {}),
    "sft, LoRA, checkpointing": ("sft", True, {"activation_checkpointing": True, "per_device_train_batch_size": 8}),
    "reward": ("reward", False, {"per_device_train_batch_size": 2}),
    "reward, LoRA, checkpointing": ("reward", True, {"activation_checkpointing": True}),
    "reward, DeBERTa": ("reward", False, {"per_device_train_batch_size": 2}),
    "dpo": ("dpo", False, {"per_device_train_batch_size": 2}),
    "dpo, precomputed, checkpointing": (
        *("dpo", False),
        {"precompute_ref_log_probs": True, "activation_checkpointing": True},
    ),
    "dpo, LoRA": ("dpo", True, {"per_device_train_batch_size": 2}),
    "ppo": ("ppo", False, {}),
    "ppo, checkpointing, 2 accumulated": (
        *("ppo", False),
        {"activation_checkpointing": True, "gradient_accumulation_steps": 2},
    ),
    "ppo, LoRA": ("ppo", True, {}),
    "ppo, LoRA, checkpointing, 64 rows generated": (
        *("ppo", True),
        {"activation_checkpointing": True, "num_mini_batches": 16, "local_rollout_forward_batch_size": 64},
    ),
}


def model_config(name: str, tiny: bool = False):
    size = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8, "num_attention_heads": 8}
    if tiny:
        size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if "DeBERTa" in name:
        relative = {
            "relative_attention": True,
            "pos_att_type": "p2c|c2p",
            "position_buckets": 256,
            "max_relative_positions": -1,
        }
        return DebertaV2Config(**size, **tokens, **relative, position_biased_input=False, type_vocab_size=0)
    return LlamaConfig(**size, **tokens, num_key_value_heads=2 if tiny else 4, max_position_embeddings=1024)


def adapter(stage: str):
    return LoraConfig(r=16, target_modules="all-linear", task_type="SEQ_CLS" if stage == "reward" else "CAUSAL_LM")


def arguments(name: str, folder: str):
    stage, _, more = SETTINGS[name]
    base = {
        **{"output_dir": folder, "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True},
        **{"save_strategy": "no", "activation_checkpointing": False, "per_device_train_batch_size": 4},
        **{"max_steps": 2, "dataloader_pin_memory": False},
    }
    own = {"max_completion_length": 32, "num_ppo_epochs": 1, "local_rollout_forward_batch_size": 8}
    return CONFIGS[stage](**{**base, **(own if stage == "ppo" else {"max_length": LENGTH}), **more})


def predicted(name: str) -> int:
    stage, lora, _ = SETTINGS[name]
    args, config = arguments(name, "unused"), model_config(name)
    peft = {"peft_config": adapter(stage)} if lora else {}
    rewards = {"rewards": (config,), "prompt_length": LENGTH - 32} if stage == "ppo" else {}
    return plan(Job(stage, args, config, **peft, **rewards)).peak


def train(name: str, tiny: bool) -> None:
    stage, lora, _ = SETTINGS[name]
    config, tokenizer = model_config(name, tiny), tiny_tokenizer(WORDS)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(name, folder)
        rows = 128

        def text(n):
            return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (n,)).tolist())

        common = {"args": args, "processing_class": tokenizer, "peft_config": adapter(stage) if lora else None}
        if stage == "reward":
            auto, trainer = AutoModelForSequenceClassification, RewardTrainer
            data = {name: [text(LENGTH - 1) for _ in range(rows)] for name in ("chosen", "rejected")}  # and EOS
            config.num_labels = 1
        elif stage == "dpo":
            auto, trainer = AutoModelForCausalLM, DPOTrainer
            data = {"prompt": [text(64) for _ in range(rows)]}
            data |= {name: [text(LENGTH) for _ in range(rows)] for name in ("chosen", "rejected")}
        elif stage == "sft":
            auto, trainer = AutoModelForCausalLM, SFTTrainer
            data = {"text": [text(LENGTH + 1) for _ in range(rows)]}
        else:
            auto, trainer = AutoModelForCausalLM, PPOTrainer
            data = {"prompt": [text(LENGTH - 32) for _ in range(rows)]}
            twin = type(config)(**{**config.to_dict(), "num_labels": 1})
            common["reward_funcs"] = AutoModelForSequenceClassification.from_config(twin)
        if stage == "dpo" and not lora and not args.precompute_ref_log_probs:
            common["ref_model"] = auto.from_config(config)
        dataset = Dataset.from_dict(data)
        trainer(model=auto.from_config(config), train_dataset=dataset, **common).train()


def resident(peak: bool = False) -> int:
    key = "VmHWM" if peak else "VmRSS"
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)]
    return int(line.split()[1]) * 1024


def measure(name: str) -> None:
    torch.set_num_threads(1)
    train(name, tiny=True)
    gc.collect()
    before = resident()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    train(name, tiny=False)
    print(f"MEASURED {resident(peak=True) - before}")


def main() -> None:
    rows, errors = [], []
    for name in SETTINGS:
        command = [sys.executable, "-m", "tests.benchmarks.plan", "--measure", name]
        # A freed tensor goes back to the system at once, as on a GPU to its allocator
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MALLOC_MMAP_THRESHOLD_": "65536",
            "MALLOC_ARENA_MAX": "1",
        }
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("MEASURED")]
        if not lines:
            raise RuntimeError(f"{name} failed:\n{done.stderr[-2000:]}")
        real, planned = int(lines[0].split()[1]), predicted(name)
        errors.append(planned / real - 1)
        rows.append(f"| {name} | {planned / 2**20:,.0f} | {real / 2**20:,.0f} | {errors[-1]:+.1%} |")
        print(rows[-1], flush=True)
    median = statistics.median(map(abs, errors))
    worst = max(errors, key=abs)
    summary = f"Median error {median:.1%}, worst {worst:+.1%}, over {len(errors)} configurations."
    print(summary)
    page = ROOT / "docs" / "plan.md"
    text = page.read_text() if page.exists() else ""
    head = text.split(MARK)[0].rstrip()
    table = ["| configuration | planned, MiB | measured, MiB | error |", "|---|---|---|---|", *rows]
    page.write_text("\n".join([head, "", MARK, "", summary, "", *table]) + "\n")


MARK = "<!-- written by `python -m tests.benchmarks.plan` -->"

if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2])
    else:
        main()
