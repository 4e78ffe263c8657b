"""
Train tiny runs, and say by hashes which bits they end with: whether a change of the code has changed what is trained.

    python -m tests.frozen.bits [--write FILE | --against FILE] [--only NAME …]

Bits differ between CPUs and versions of torch, so they are compared between two checkouts on one machine:

    git worktree add ../before COMMIT
    (cd ../before && PYTHONPATH=$PWD python -m tests.frozen.bits --write before.json)
    PYTHONPATH=$PWD python -m tests.frozen.bits --against ../before/before.json

Where a commit has no such file yet, copy this one there. It imports public names and `tests/tiny.py` alone. Where
something differs, the first step and the keys of the log that do are printed, and the exit status is 1.
"""

import argparse
import contextlib
import hashlib
import io
import json
import re
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file

import trl_ext
from tests.tiny import (
    ON_CPU,
    WORDS,
    length_reward,
    prompts,
    tiny_config,
    tiny_llama,
    tiny_reward_model,
    tiny_tokenizer,
)
from trl_ext.callbacks import attach_monitors, load_monitors
from trl_ext.ppo import load_critic, score_rollouts, with_returns, with_token_ids
from trl_ext.resumable import ResumableRewardTrainer, ResumableSFTTrainer, RewardConfig, SFTConfig
from trl_ext.rewards import CachedReward, EnsembleReward, PatternReward, RepetitionWatch, SumReward

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "lora_dropout": 0.1}
OTHERS = {**ON_CPU, "gradient_checkpointing": False, "per_device_train_batch_size": 4, "learning_rate": 1e-3}
TIMES = re.compile(r"time|runtime|per_second|seconds|(^|/)(tps|eps)$|total_flos|memory")
RUNS = {}


def run(function):
    RUNS[function.__name__.replace("_", " ")] = function
    return function


def words(generator, low, high):
    length = int(torch.randint(low, high, (), generator=generator))
    return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (length,), generator=generator))


def pairs(n=16):
    """Pairs of different answers, with all that is read beside them."""
    generator, rows = torch.Generator().manual_seed(0), []
    for i in range(n):
        texts = [words(generator, 2, (4, 12)[i % 2]) for _ in range(2)]
        row = {"prompt": f"{words(generator, 1, 5)} ", "chosen": f"{texts[0]} cat", "rejected": f"{texts[1]} dog"}
        row |= {"score_chosen": 1.0 + i % 3, "score_rejected": 0.5, "confidence": 0.5 + 0.1 * (i % 5)}
        rows.append(row | {"weight": 0.25 * (1 + i % 5), "source": ("short", "long")[i % 2]})
    return Dataset.from_list(rows)


def letters(completions, **kwargs):
    return [text.count("a") / 4 for text in completions]


def some(completions, **kwargs):
    return [None if len(text) % 3 == 0 else len(text) / 20 for text in completions]


def by_token(completion_ids, **kwargs):
    return [[(token % 5) / 10 for token in ids] for ids in completion_ids]


def ppo(folder, rewards=(length_reward,), model=None, trainer_kwargs=None, monitors=(), **settings):
    trainer = trl_ext.PPOTrainer(
        model=model or tiny_llama(),
        reward_funcs=list(rewards),
        args=tiny_config(folder, **{"max_steps": 8, **({} if "lam_alpha" in settings else {"lam": 0.95}), **settings}),
        train_dataset=prompts(),
        processing_class=tiny_tokenizer(),
        **(trainer_kwargs or {}),
    )
    attach_monitors(trainer, load_monitors(monitors))
    return trainer


def with_names(pairs, *names):
    return pairs.select_columns(["prompt", "chosen", "rejected", *names])


def dpo(folder, columns=(), trainer_kwargs=None, **settings):
    args = trl_ext.DPOConfig(str(folder), **{**OTHERS, "record_run": False, "max_steps": 6, **settings})
    return trl_ext.DPOTrainer(
        model=tiny_llama(),
        args=args,
        train_dataset=with_names(pairs(), *columns),
        processing_class=tiny_tokenizer(),
        **(trainer_kwargs or {}),
    )


@run
def ppo_full(folder):
    return ppo(folder, eval_strategy="steps", eval_steps=4, trainer_kwargs={"eval_dataset": prompts(6, seed=1)})


@run
def ppo_lora(folder):
    return ppo(folder, trainer_kwargs={"peft_config": LoraConfig(**LORA)}, disable_dropout=False)


@run
def ppo_adaptive_kl_normalised_with_warmup(folder):
    adapted = {"kl_controller": "adaptive", "kl_target": 0.1, "kl_horizon": 20, "kl_coef": 0.2}
    return ppo(
        folder,
        reward_normalization="running",
        critic_warmup_rollouts=1,
        critic_learning_rate=3e-3,
        gamma=0.95,
        **adapted,
    )


@run
def ppo_watched_with_many_rewards(folder):
    rewards = [
        tiny_reward_model(tiny_llama()),
        length_reward,
        CachedReward(letters),
        SumReward([PatternReward(["cat"]), some], weights=[1.0, 0.5], on_error="skip"),
        EnsembleReward([letters, length_reward], combine="uncertainty", uncertainty_coef=0.5),
        RepetitionWatch(),
    ]
    monitors = ["KLBudgetCallback(limit=1e-6, action='raise_kl')", "EntropyFloorCallback", "RewardDriftCallback"]
    return ppo(
        folder,
        rewards,
        trainer_kwargs={"reward_processing_classes": [tiny_tokenizer(), *[None] * 5]},
        monitors=monitors,
        reward_weights=[1.0, 0.1, 0.5, 1.0, 0.2, 0.0],
        missing_eos_penalty=0.5,
        critic_trains="mlp",  # from the reward model, whose head is not 0
        reward_clip_range=(-2.0, 2.0),
    )


@run
def ppo_scores_of_tokens(folder):
    return ppo(folder, [by_token, some], reward_weights=[1.0, 1.0], reward_normalization="batch", whiten_rewards=True)


@run
def ppo_lambda_of_each_length(folder):
    return ppo(folder, lam_alpha=0.5, kl_estimator="k3", entropy_coef=0.01, max_approx_kl=0.05, dual_clip=3.0)


@run
def ppo_padded(folder):
    return ppo(folder, padding_free=False, critic_steps=2)


@run
def ppo_moving_reference_of_several_answers(folder):
    moves = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}
    return ppo(folder, num_generations=2, lam_value=1.0, mask_truncated_completions=True, epsilon_high=0.28, **moves)


@run
def ppo_ahead(folder):
    return ppo(folder, rollouts_ahead=1, max_steps=8)


@run
def dpo_plain(folder):
    return dpo(folder, log_displacement=True)


@run
def dpo_adaptive_with_margins(folder):
    return dpo(
        folder,
        ("score_chosen", "score_rejected", "confidence", "weight", "source"),
        **{"beta_controller": "beta_dpo", "beta_dpo_keep": 0.75, "margin_normalization": "source"},
        **{
            "margin_warmup_pairs": 4,
            "use_margin": True,
            "use_confidence": True,
            "use_weight": True,
            "dpop_lambda": 2.0,
        },
    )


@run
def dpo_drift_lora(folder):
    drift = {"beta_controller": "drift", "drift_target": 0.3, "drift_horizon": 20}
    return dpo(folder, trainer_kwargs={"peft_config": LoraConfig(**LORA)}, **drift)


@run
def critic(folder):
    policy, rows = tiny_llama(), prompts(12).to_list()
    tiny_reward_model(policy).save_pretrained(folder / "start")
    generator = torch.Generator().manual_seed(2)
    rows = [row | {"completion": words(generator, 1, 7), "finished": bool(i % 3)} for i, row in enumerate(rows)]
    args = {**ON_CPU, "activation_checkpointing": False, "per_device_train_batch_size": 4, "learning_rate": 1e-2}
    args |= {"max_steps": 6, "eval_on_start": False, "record_run": False, "gamma": 0.9, "missing_eos_penalty": 0.5}
    args = trl_ext.CriticConfig(str(folder), **args)
    tokenizer = tiny_tokenizer()
    rollouts = with_token_ids(Dataset.from_list(rows), tokenizer, [2], len(tokenizer), 64)
    scores, tokens = score_rollouts(rollouts, [length_reward], ["length"], 4)
    rollouts = with_returns(rollouts, scores, args, tokens)
    return trl_ext.CriticTrainer(
        load_critic(str(folder / "start"))[0], args, train_dataset=rollouts, processing_class=tokenizer
    )


@run
def sft(folder):
    generator = torch.Generator().manual_seed(3)
    texts = Dataset.from_list([{"text": words(generator, 3, 12)} for _ in range(16)])
    return ResumableSFTTrainer(
        model=tiny_llama(),
        args=SFTConfig(str(folder), **OTHERS, max_steps=6, max_length=32),
        train_dataset=texts,
        processing_class=tiny_tokenizer(),
    )


@run
def reward(folder):
    return ResumableRewardTrainer(
        model=tiny_reward_model(tiny_llama()),
        args=RewardConfig(str(folder), **OTHERS, max_steps=6, max_length=32, use_confidence=True, use_weight=True),
        train_dataset=with_names(pairs(), "confidence", "weight"),
        processing_class=tiny_tokenizer(),
    )


def bits_of(name, folder):
    """Train a run; return the hashes of what it saves and logs, and its log."""
    trainer = RUNS[name](folder)
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    weights = hashlib.sha256()
    for path in sorted(folder.glob("saved/**/*.safetensors")):
        for key, tensor in sorted(load_file(path).items()):
            weights.update(f"{path.relative_to(folder)} {key} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            weights.update(tensor.numpy().tobytes())
    logs = [{key: log[key] for key in sorted(log) if not TIMES.search(key)} for log in trainer.state.log_history]
    logs = json.loads(json.dumps(logs, default=str))
    return {"weights": weights.hexdigest(), "logs": hashlib.sha256(json.dumps(logs).encode()).hexdigest(), "log": logs}


def difference(before, now):
    """Say where the logs of a run differ first; nothing if all is the same."""
    for old, new in zip(before["log"], now["log"], strict=False):
        if json.dumps(old) != json.dumps(new):
            keys = [key for key in sorted({*old, *new}) if json.dumps(old.get(key)) != json.dumps(new.get(key))]
            return f"step {new.get('step')}: {', '.join(f'{k} {old.get(k)} → {new.get(k)}' for k in keys[:4])}" + (
                f" and {len(keys) - 4} more" if len(keys) > 4 else ""
            )
    if len(before["log"]) != len(now["log"]):
        return f"{len(before['log'])} logs before, {len(now['log'])} now"
    return "" if before["weights"] == now["weights"] else "the final weights alone"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--write", type=Path, help="file that the hashes and logs are written to")
    place.add_argument("--against", type=Path, help="file of another checkout, to compare with")
    parser.add_argument("--only", nargs="+", choices=list(RUNS), help="runs to do")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found, began = {}, time.monotonic()
    for name in args.only or RUNS:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            found[name] = bits_of(name, Path(folder))
        print(f"{time.monotonic() - began:6.1f} s  {name}", file=sys.stderr)
    print(json.dumps({name: {"weights": f["weights"], "logs": f["logs"]} for name, f in found.items()}, indent=2))
    if args.write:
        args.write.write_text(json.dumps(found))
    if args.against:
        before = json.loads(args.against.read_text())
        missing = [name for name in found if name not in before]
        differ = {
            name: said for name, new in found.items() if name in before and (said := difference(before[name], new))
        }
        for name, said in differ.items():
            print(f"DIFFERS  {name}: {said}", file=sys.stderr)
        for name in missing:
            print(f"MISSING  {name}: {args.against} has none", file=sys.stderr)
        same = len(found) - len(differ) - len(missing)
        print(f"{same} of {len(found)} runs are the same, to the bit", file=sys.stderr)
        sys.exit(1 if differ or missing else 0)


if __name__ == "__main__":
    main()
