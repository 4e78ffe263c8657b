"""Each field that `PPOConfig` adds changes the trained weights, or is in a table of what it does instead."""

import dataclasses

import pytest
import torch
from trl import GRPOConfig

from tests.tiny import WORDS, assert_each_changes, length_reward, prompts, tiny_gpt2, tiny_ppo
from trl_ext import PPOConfig
from trl_ext.ppo.config import REFUSED

pytestmark = pytest.mark.slow

ADAPTIVE = {"kl_controller": "adaptive", "kl_horizon": 50.0, "max_steps": 6}  # the KL of the first rollout is 0
CHANGED = {  # field -> another value, and the settings that it needs
    "adam_epsilon": (1e-2, {}),
    "baseline": ("mean", {}),
    "cliprange": (1e-3, {}),
    "cliprange_value": (1e-3, {}),
    "critic_learning_rate": (1e-3, {}),
    "critic_warmup_rollouts": (1, {}),
    "disable_dropout": (False, {}),
    "dual_clip": (1.0001, {}),
    "entropy_coef": (1.0, {}),
    "gae_level": ("turn", {}),
    "gamma": (0.5, {}),
    "importance_sampling_clip_max": (1.01, {"generation_kwargs": {"temperature": 0.7}}),
    "importance_sampling_clip_min": (0.9, {"generation_kwargs": {"temperature": 0.7}}),
    "importance_sampling_mode": ("sequence_truncate", {"generation_kwargs": {"temperature": 0.7}}),
    "kl_coef": (1.0, {}),
    "kl_coef_max": (0.05, {**ADAPTIVE, "kl_target": 1e-6, "max_steps": 8}),
    "kl_coef_min": (0.05, {**ADAPTIVE, "kl_target": 1e6}),
    "kl_controller": ("adaptive", {}),
    "kl_estimator": ("k2", {}),
    "kl_horizon": (10.0, ADAPTIVE),
    "kl_target": (1e-6, ADAPTIVE),
    "lam": (0.5, {}),
    "lam_alpha": (1.5, {}),
    "lam_value": (0.5, {}),
    "learning_rate": (1e-4, {}),
    "local_rollout_forward_batch_size": (3, {}),  # the chunks are sampled one after the other
    "missing_eos_penalty": (9.0, {}),
    "missing_eos_score": (-9.0, {}),
    "normalize_advantages": (False, {}),
    "num_generations": (2, {}),
    "num_mini_batches": (1, {}),
    "step_kl_target": (1e-7, {}),
    "num_ppo_epochs": (2, {}),
    "ratio_band": ([0.999, 1.001], {}),
    "reward_group_column": ("sort", {"reward_normalization": "group", "reward_group_column": "topic"}),
    "reward_normalization": ("running", {}),
    "stop_token_id": (9, {}),
    "total_episodes": (8, {}),
    "vf_coef": (3.0, {}),
    "reward_clip_range": ((-0.5, 0.5), {}),
    "whiten_rewards": (True, {}),
}
WITHOUT_WEIGHTS = {  # field -> what it does instead
    "tool_timeout": "how long a tool may take",
    "allow_off_policy_sampling": "a permission, weights of 1 but for rounding, and `sampling/…`",
    "num_completions_to_print": "what `log_completions` prints",
    "logits_budget_gb": "memory and time: the log-probs are the same",
    "on_save_failure": "whether the run ends",
    "old_logprobs": "rounding, and a forward less, where the policy samples",
    "padding_free": "rounding, and padding less",
    "record_run": "what is written beside the model",
    "rollouts_ahead": "what a vLLM server samples, and when",
    "resume_anyway": "a permission",
    "save_in_background": "time",
    "staging_dir": "where a checkpoint is written first",
    "share_reward_base": "memory: the scores are the same",
    "watch": "whether somebody is told of a hack, and the run ended",
    "use_ref_model": "memory, and whether KL is logged: it needs `kl_coef=0`",
}


def trained(tmp_path, **config):
    n = 16
    rows = prompts(n).add_column("sort", ["a"] * n).add_column("completion", WORDS[:n])
    rows = rows.add_column("other", [f"{word} {word} {word}" for word in WORDS[:n]])
    steps = {"max_steps": -1 if "total_episodes" in config else 4, "num_ppo_epochs": 1}
    model = tiny_gpt2(attn_pdrop=0.3, embd_pdrop=0.3, resid_pdrop=0.3)
    model.lm_head.weight.data[2] *= 2  # so that EOS is sampled sometimes
    config = {"learning_rate": 1e-2, "num_train_epochs": 2.0, "train_dataset": rows, **steps, **config}
    torch.manual_seed(0)
    trainer = tiny_ppo(tmp_path, model, length_reward, **config)
    torch.manual_seed(0)
    trainer.train()
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def test_each_field_is_in_one_table():
    inherited = {f.name: f.default for f in dataclasses.fields(GRPOConfig)}
    ours = {f.name for f in dataclasses.fields(PPOConfig) if inherited.get(f.name, ...) != f.default}
    assert ours - REFUSED.keys() | {"entropy_coef"} == CHANGED.keys() | WITHOUT_WEIGHTS.keys()


def test_a_field_changes_the_trained_weights(subtests, tmp_path):
    assert_each_changes(CHANGED, lambda **config: trained(tmp_path, **config), subtests)
