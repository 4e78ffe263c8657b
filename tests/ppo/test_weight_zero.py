"""A reward of weight 0 only measures: with it PPO trains the same bits."""

import random

import numpy as np
import pytest
import torch
from peft import LoraConfig

from tests.rewards.test_model import adapted, saved
from tests.tiny import length_reward, tiny_llama, tiny_ppo, tiny_reward_model, tiny_tokenizer
from trl_ext.rewards import GoldJudgeReward, PhraseReviewReward, RepetitionWatch, ScoreWatch

# ---- Rewards that are trained on: some rows get both, some one, some none ----


def short(completions, **kwargs):
    return [float("cat" in text) + 0.1 * len(text) if len(text) % 3 else None for text in completions]


def even(completions, **kwargs):
    return [len(text) / 7 if len(text) % 2 == 0 else None for text in completions]


def by_token(completions, completion_ids, **kwargs):
    return [
        [0.1 * i for i in ids] if len(text) % 2 == 0 else None
        for text, ids in zip(completions, completion_ids, strict=True)
    ]


# ---- Rewards that only measure ----


def some(completions, **kwargs):
    return [None if i % 3 else 5.0 for i in range(len(completions))]


def of_tokens(completions, completion_ids, **kwargs):
    return [[1.0] * len(ids) for ids in completion_ids]


def uses_random_numbers(completions, **kwargs):
    return [random.random() + np.random.rand() + torch.rand(()).item() for _ in completions]


async def uses_random_numbers_async(completions, **kwargs):
    return uses_random_numbers(completions)


def uses_random_numbers_in_background(completions, **kwargs):
    return uses_random_numbers(completions)


uses_random_numbers_in_background.in_background = True


def reward_model(folder):
    return tiny_reward_model(tiny_llama(), seed=8)


MEASURED = {
    "some": lambda folder: some,
    "none": lambda folder: lambda completions, **kwargs: [None] * len(completions),
    "tokens": lambda folder: of_tokens,
    "random": lambda folder: uses_random_numbers,
    "random later": lambda folder: uses_random_numbers_async,
    "random in background": lambda folder: uses_random_numbers_in_background,
    "model": reward_model,  # a critic would be its copy
    "adapter": lambda folder: adapted(folder / "adapter", saved(folder / "rm", reward_model(folder)), 5),
    "repetition": lambda folder: RepetitionWatch(score=0.0),
    "phrases": lambda folder: PhraseReviewReward(["the", "cat"], veto=-1.0),
    "gold": lambda folder: GoldJudgeReward(length_reward, column="topic"),
    "scores": lambda folder: ScoreWatch(length_reward),
}

QUICK = ("some", "random in background")
RUNS = {
    "plain": {"missing_eos_penalty": 1.0},
    "groups": {"num_generations": 4, "reward_normalization": "group", "reward_group_column": "topic"},
    "tokens": {"reward_normalization": "running", "whiten_rewards": True, "missing_eos_score": -1.0},
    "lora": {"reward_normalization": "batch", "share_reward_base": False},  # the adapter's base is another model
}


def trained(folder, run, measured=None):
    """All weights after training, and the number of rows that were trained on."""
    rewards, weights = [by_token if run == "tokens" else short, even], [0.5, -1.0]
    tokenizers = [None, None]
    if measured is not None:
        rewards, weights, tokenizers = [measured, *rewards], [0.0, *weights], [tiny_tokenizer(), *tokenizers]
    given = {"reward_processing_classes": tokenizers, "reward_weights": weights, **RUNS[run]}
    if run == "lora":
        given["peft_config"] = LoraConfig(r=2, target_modules=["q_proj"])
    trainer = tiny_ppo(folder / run, None, rewards, num_ppo_epochs=1, learning_rate=1e-2, **given)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    unscored = sum(log.get("objective/num_unscored", 0) for log in trainer.state.log_history)
    after = {name: p.detach() for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert any(not torch.equal(before[name], after[name]) for name in after)
    return after, unscored


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """The trained weights of each run without a reward of weight 0, computed once."""
    known = {}

    def of(run):
        if run not in known:
            known[run] = trained(tmp_path_factory.mktemp(run), run)
        return known[run]

    return of


@pytest.mark.parametrize(
    "name, run",
    [
        *((name, "groups") for name in QUICK),
        *(pytest.param(name, "groups", marks=pytest.mark.slow) for name in MEASURED if name not in QUICK),
        *(pytest.param(name, "plain", marks=pytest.mark.slow) for name in ("some", "tokens", "adapter")),
        *(pytest.param(name, "lora", marks=pytest.mark.slow) for name in ("some", "random", "adapter")),
        *(pytest.param(name, "tokens", marks=pytest.mark.slow) for name in ("some", "tokens")),
    ],
)
def test_a_reward_of_weight_0_changes_no_weight_by_a_bit(tmp_path, without, run, name):
    expected, unscored = without(run)
    assert unscored > 0  # else rows without a score would not be tested
    weights, still_unscored = trained(tmp_path, run, MEASURED[name](tmp_path))
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)
    assert still_unscored == unscored
