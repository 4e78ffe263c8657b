"""Principles that cap a score."""

import math

import pytest
from trl import GRPOConfig, GRPOTrainer

from tests.tiny import ON_CPU, length_reward, prompts, tiny_config, tiny_gpt2, tiny_tokenizer
from trl_ext import PPOTrainer
from trl_ext.rewards import (
    CachedReward,
    ConstitutionReward,
    PatternReward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
)
from trl_ext.rewards.background import runs_in_background


def length(completions, **kwargs):
    return [float(len(each)) for each in completions]


class Judge:
    """Scores a completion by a number in it, and records the completions."""

    __name__ = "judge"
    in_background = True

    def __init__(self):
        self.asked = []

    def __call__(self, prompts, completions, topic, **kwargs):
        self.asked += zip(prompts, completions, topic, strict=True)
        return [None if "?" in each else float(each.split()[0]) for each in completions]


def call(reward, *completions, **kwargs):
    logged = {}
    columns = {"prompts": [f"p{i}" for i in range(len(completions))], "completions": list(completions)}
    scores = reward(**columns, topic=[*range(len(completions))], log_metric=logged.__setitem__, **kwargs)
    return scores, logged


def test_a_violation_only_caps_the_score():
    reward = ConstitutionReward(length, [PatternReward(forbidden=["bad"]), PatternReward(forbidden=["z"])], cap=4.0)
    scores, logged = call(reward, "good one", "bad one!", "bad", "bad z long")
    assert scores == [8.0, 4.0, 3.0, 4.0]  # 3: a cap raises nothing
    assert reward.__name__ == "constitution_length" and not runs_in_background(reward)
    name = "rewards/constitution_length"
    assert logged == {
        f"{name}/violations/forbidden_pattern_0": 0.75,
        f"{name}/violations/forbidden_pattern_1": 0.25,
        f"{name}/violations": 0.75,
        f"{name}/unchecked": 0.0,
    }


def test_the_judge_scores_what_keeps_the_rules_and_no_score_is_no_consent():
    judge = Judge()
    reward = ConstitutionReward(length, [PatternReward(forbidden=["bad"])], cap=0.0, judge=judge, judge_minimum=7)
    scores, logged = call(reward, "9 fine", "9 bad", "6 meh", "? who")
    assert scores == [6.0, 0.0, 0.0, None] and runs_in_background(reward)
    assert judge.asked == [("p0", "9 fine", 0), ("p2", "6 meh", 2), ("p3", "? who", 3)]
    name = "rewards/constitution_length"
    assert logged[f"{name}/violations/judge"] == 0.5 and logged[f"{name}/unchecked"] == 0.25


@pytest.mark.parametrize("on_error, expected", [("raise", "reward 'broken'.*for completion 1"), ("skip", [1.0, None])])
def test_with_a_failed_check_nothing_passes(on_error, expected):
    def broken(completions, **kwargs):
        return [1.0, math.nan]

    reward = ConstitutionReward(length, [broken], cap=-1.0, on_error=on_error)
    if on_error == "raise":
        with pytest.raises(RuntimeError, match=expected):
            call(reward, "a", "b")
    else:
        assert call(reward, "a", "b")[0] == expected


def rules():
    """One of each reward with settings, each within another where possible."""
    kept = ConstitutionReward(CachedReward(length_reward), [PatternReward(forbidden=[r"\bcat\b"])], cap=-1.0)
    return [kept, get_soft_overlong_punishment(8, 4), get_repetition_penalty_reward(2)]


@pytest.mark.parametrize("trainer, config", [(GRPOTrainer, GRPOConfig), (PPOTrainer, None)])
def test_in_stock_trainers_and_in_ours(trainer, config, tmp_path):
    given = {"max_completion_length": 8, "max_steps": 4, "logging_steps": 1}
    args = tiny_config(tmp_path, **given)
    if config is not None:
        args = config(str(tmp_path), **ON_CPU | given, per_device_train_batch_size=4, num_generations=2, beta=0.0)
    run = trainer(tiny_gpt2(), rules(), args=args, train_dataset=prompts(), processing_class=tiny_tokenizer())
    run.train()
    logged = {key for log in run.state.log_history for key in log}
    name = "rewards/constitution_cached_length_reward"
    assert {f"{name}/mean", f"{name}/violations", "rewards/cached_length_reward/cache_hits"} <= logged
    assert {f"rewards/{each}_reward/mean" for each in ("soft_overlong_punishment", "repetition_penalty")} <= logged
    assert {f"{name}/violations/forbidden_pattern"} <= logged
