"""
The runs whose folders `make.py` has frozen, each as one command, relative to the working directory.

Never change what a command says: that a run which began at 0.2.0 goes on by the same command is what is tested.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
    get_constant_schedule,
)

import trl_ext.callbacks
import trl_ext.data.pair_columns
import trl_ext.ppo.critic_trainer
import trl_ext.rewards
import trl_ext.runs.checkpoints
import trl_ext.stages

ON_CPU = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "logging_steps": 1, "seed": 3}
SAVING = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6, "per_device_train_batch_size": 4}
PPO = {
    **{"lam": 0.95, "baseline": "critic"},  # the defaults at 0.2.0
    **{**ON_CPU, **SAVING, "activation_checkpointing": False, "num_mini_batches": 2, "num_ppo_epochs": 1},
    **{"max_completion_length": 6, "learning_rate": 1e-3},
}
LORA = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0}
MONITORS = [
    "KLBudgetCallback(limit=1e-6)",
    "EntropyFloorCallback(floor=50, steps=1)",
    "LengthDriftCallback",
    "RewardDriftCallback",
    "ValueHealthCallback",
    "NotFiniteCallback",
]


def shortness(completions, **kwargs):
    """A user's reward function, which is told by its source."""
    return [1 - len(text.split()) / SCALE for text in completions]


SCALE = 10.0


class Letters:
    """A user's reward with a setting."""

    __name__ = "letters"

    def __init__(self, letter):
        self.letter = letter

    def __call__(self, completions, **kwargs):
        return [text.count(self.letter) / 10 for text in completions]


class Doubled(trl_ext.rewards.PatternReward):
    """A user's reward that stands on one of ours."""

    def __call__(self, *args, **kwargs):
        return [score and 2 * score for score in super().__call__(*args, **kwargs)]


def capped(completions, **kwargs):
    """A user's function that names a class and a function of ours."""
    scores = trl_ext.rewards.PatternReward(["cat"])([], completions)
    return [0.0 if has_content(text) else score for text, score in zip(completions, scores, strict=True)]


has_content = trl_ext.data.has_content


def rewards():
    """Reward functions of every kind: a model, users' own, ours, and ours around others."""
    has_cat = trl_ext.rewards.PatternReward(required=["cat|dog"], name="has_pet")
    return [
        "start/reward",
        shortness,
        trl_ext.rewards.CachedReward(Letters("a"), capacity=100),
        trl_ext.rewards.SumReward([has_cat, shortness, Letters("o")], weights=[1, 0.5, 0], name="sum"),
        Doubled(["sat"], name="doubled"),
        capped,
        trl_ext.rewards.RepetitionWatch(),
    ]


def ppo(folder):
    reward_funcs = rewards()
    args = trl_ext.PPOConfig(
        folder,
        **PPO,
        reward_weights=[1.0, 0.5, 0.25, 1.0, 0.1, 0.0, 0.0],
        kl_controller="adaptive",
        kl_horizon=50,
        reward_normalization="running",
        critic_warmup_rollouts=1,
        sync_ref_model=True,
        ref_model_sync_steps=2,
        ref_model_mixup_alpha=0.5,
    )
    trainer = trl_ext.PPOTrainer(
        model="start/policy", reward_funcs=reward_funcs, args=args, train_dataset=rows("prompts")
    )
    trl_ext.callbacks.attach_monitors(trainer, trl_ext.callbacks.load_monitors(MONITORS))
    return trainer


def ppo_lora(folder):
    return trl_ext.PPOTrainer(
        model="start/policy",
        reward_funcs=[shortness],
        args=trl_ext.PPOConfig(folder, **{**PPO, "lam": None}, lam_alpha=0.5, record_run=False),
        train_dataset=rows("prompts"),
        peft_config=LoraConfig(**LORA),
    )


def ppo_ahead(folder):
    return trl_ext.PPOTrainer(
        model="start/policy",
        reward_funcs=[shortness],
        args=trl_ext.PPOConfig(folder, **PPO, rollouts_ahead=1, record_run=False),
        train_dataset=rows("prompts"),
    )


def dpo(folder):
    args = {**ON_CPU, **SAVING, "gradient_checkpointing": False, "learning_rate": 1e-3, "sync_ref_model": True}
    args |= {"beta_controller": "beta_dpo", "margin_normalization": "source", "margin_warmup_pairs": 4}
    args |= {"use_margin": True, "use_confidence": True, "use_weight": True, "ref_model_sync_steps": 2}
    args |= {"ref_model_mixup_alpha": 0.5, "distribution_shift_samples": 0}
    return trl_ext.DPOTrainer(
        model="start/policy", args=trl_ext.DPOConfig(folder, **args), train_dataset=rows("pairs")
    )


def dpo_lora(folder):
    args = {**ON_CPU, **SAVING, "gradient_checkpointing": False, "learning_rate": 1e-3, "record_run": False}
    args |= {"beta_controller": "drift", "drift_target": 0.3, "drift_horizon": 20, "distribution_shift_samples": 0}
    return trl_ext.DPOTrainer(
        model="start/policy",
        args=trl_ext.DPOConfig(folder, **args),
        train_dataset=rows("pairs").select_columns(["prompt", "chosen", "rejected"]),
        peft_config=LoraConfig(**LORA),
    )


def sft(folder):
    """With an optimizer and a schedule of one's own."""
    args = trl_ext.stages.SFTConfig(folder, **ON_CPU, **SAVING, gradient_checkpointing=False, max_length=32)
    model = AutoModelForCausalLM.from_pretrained("start/policy")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return trl_ext.stages.ResumableSFTTrainer(
        model=model,
        args=args,
        train_dataset=rows("texts"),
        processing_class=AutoTokenizer.from_pretrained("start/policy"),
        optimizers=(optimizer, get_constant_schedule(optimizer)),
        run_facts={"a fact": "of the script"},
    )


def reward(folder):
    """With what else is known of the pairs, so that the collator is one of ours."""
    args = {**ON_CPU, **SAVING, "gradient_checkpointing": False, "max_length": 32}
    return trl_ext.stages.ResumableRewardTrainer(
        model=AutoModelForSequenceClassification.from_pretrained("start/reward"),
        args=trl_ext.stages.RewardConfig(folder, **args, use_confidence=True, use_weight=True),
        train_dataset=rows("pairs"),
        processing_class=AutoTokenizer.from_pretrained("start/policy"),
    )


def critic(folder):
    args = {**ON_CPU, **SAVING, "activation_checkpointing": False, "eval_on_start": False, "learning_rate": 1e-2}
    args = trl_ext.ppo.CriticConfig(folder, **args, gamma=0.9, record_run=False)
    tokenizer = AutoTokenizer.from_pretrained("start/policy")
    rollouts = trl_ext.ppo.with_token_ids(rows("rollouts"), tokenizer, [2], len(tokenizer), 64)
    scores, tokens = trl_ext.ppo.score_rollouts(rollouts, [shortness], ["shortness"], 4)
    rollouts = trl_ext.ppo.with_returns(rollouts, scores, args, tokens)
    return trl_ext.ppo.CriticTrainer(
        trl_ext.ppo.load_critic("start/reward")[0], args, train_dataset=rollouts, processing_class=tokenizer
    )


COMMANDS = {each.__name__: each for each in (ppo, ppo_lora, ppo_ahead, dpo, dpo_lora, sft, reward, critic)}


def rolled_back(folder, learning_rate=1e-3):
    """A run that its monitor rolls back at once, and again until a setting is changed."""
    args = trl_ext.PPOConfig(folder, **{**PPO, "learning_rate": learning_rate, "save_strategy": "no"})
    trainer = trl_ext.PPOTrainer(
        model="start/policy", reward_funcs=[shortness], args=args, train_dataset=rows("prompts")
    )
    monitors = trl_ext.callbacks.load_monitors(["EntropyFloorCallback(floor=50, steps=1, action='rollback')"])
    trl_ext.callbacks.attach_monitors(trainer, monitors)
    return trainer


ONLINE_DPO = """
--model_name_or_path start/policy --dataset_name start/prompts --dataset_test_split test --output_dir online_dpo
--rewards {PatternReward:{required:[cat|dog|a]}} --prompts_per_round 8 --num_samples 3 --max_completion_length 6
--use_cpu true --bf16 false --report_to none --disable_tqdm true --per_device_train_batch_size 4 --save_strategy no
--per_device_eval_batch_size 8 --num_train_epochs 1 --record_run false --activation_checkpointing false
""".split()
REWARD = """
--model_name_or_path start/policy --dataset_name start/pairs --output_dir ensemble --ensemble 2 --max_steps 2
--use_cpu true --bf16 false --report_to none --disable_tqdm true --per_device_train_batch_size 4 --save_strategy no
--max_length 32 --probe_rows 0 --activation_checkpointing false --record_run false
""".split()
REFRESH = """
--model_name_or_path start/policy --reward_model_name_or_path start/reward --dataset_name start/prompts
--output_dir round-1
--max_new_tokens 6 --num_prompts 8 --queue_size 6 --batch_size 8 --use_cpu true --labels start/labels.jsonl
""".split()
REFRESH_TRAIN = ["--reward_config", "start/reward.yaml", "--reward_dataset_name", "start/pairs"]
GENERATE = """
--model_name_or_path start/policy --dataset_name start/prompts --dataset_split train --rollouts true
--output_file start/rollouts.jsonl --max_new_tokens 6 --use_cpu true
""".split()
ANNOTATORS = "annotators --dataset_name start/votes.jsonl --output_dir annotators --held_out_annotators 0".split()
PROMPTS = "prompts --sets sft=start/texts.jsonl rl=start/prompts/train.jsonl --output_dir prompts".split()


SHIPPED = (
    "recipes/demo/world.py:gold_reward",
    "recipes/demo/world.py:phrase_reward",
    "recipes/tinystories/rewards.py:happy_sentence_reward",
    "recipes/tinystories/rewards.py:repetition_reward",
    "recipes/tinystories/rewards.py:story_quality",
)


def told():
    """Return by name one of each of our classes and functions that `source_identity` may be asked of."""
    package, where = trl_ext.rewards, {"url": "http://127.0.0.1:9/v1", "model": "a"}
    pattern = package.PatternReward(["cat"])
    collator = trl_ext.data.pair_columns.PairCollator(None, ("weight",), {"a": 0})
    return {
        "cached": package.CachedReward(pattern),
        "code": package.CodeReward(),
        "constitution": package.ConstitutionReward(pattern, [Letters("a")]),
        "ensemble": package.EnsembleReward([pattern, shortness]),
        "gold judge": package.GoldJudgeReward(pattern),
        "JSON schema": package.JSONSchemaReward({"type": "object"}),
        "judge": package.JudgeReward(**where, rubric="be kind"),
        "member": package.Member(pattern),
        "model": package.ModelReward("start/reward"),
        "pattern": pattern,
        "phrase review": package.PhraseReviewReward(["a cat"]),
        "remote": package.RemoteReward(**where, api="tei"),
        "repetition": package.RepetitionWatch(corpus=["a b c"]),
        "score watch": package.ScoreWatch(pattern, bound=2.0),
        "sum": package.SumReward([pattern, shortness], [1, 2]),
        "a watch of theirs": package.repetition_watch,
        "collator": collator,
        "collate": trl_ext.ppo.critic_trainer.collate,
        "a class": package.PatternReward,
        "a method": pattern.__call__,
        "a partial": functools.partial(trl_ext.data.has_content, 1),
        "segment scores": package.SegmentScores([1], [0.5]),
        "a user's class on ours": Doubled,
        "a user's instance of it": Doubled(["sat"]),
        "a user's function with ours": capped,
        "a user's settings": SortedSettings(3),
        **{path: package.load_reward(path) for path in SHIPPED},
    }


@dataclass
class SortedSettings:
    """A user's dataclass."""

    number: int


class Interrupted(Exception):
    """Ends a run as it is."""


class After(TrainerCallback):
    """Interrupts a run once its first checkpoint is complete."""

    def on_save(self, args, state, control, **kwargs):
        raise Interrupted


def rows(name):
    path = next(
        path for path in (Path("start", f"{name}.jsonl"), Path("start", name, "train.jsonl")) if path.is_file()
    )
    return Dataset.from_list([json.loads(line) for line in path.read_text().splitlines()])
