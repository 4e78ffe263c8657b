"""Patterns as rewards: what is kept, and what cannot hang."""

import pickle
import time

import pytest
from trl.rewards import get_repetition_penalty_reward, get_soft_overlong_punishment

import trl_ext.rewards
from trl_ext.rewards import PatternReward

CATASTROPHE = r"^(([a-z])+.)+[A-Z]([a-z])+$"  # tries every way to cut the text


def score(reward, *completions, **kwargs):
    return reward(prompts=["p"] * len(completions), completions=list(completions), **kwargs)


def test_every_required_pattern_and_no_forbidden_one():
    reward = PatternReward(required=["please", r"\bthanks\b"], forbidden=[r"(?i)\bkill\b"])
    told = [{"role": "assistant", "content": "please, thanks"}]
    answers = ["please and thanks", "please", "please, thanks, KILL", "please, thanks, skill", told]
    assert score(reward, *answers) == [1.0, 0.0, 0.0, 1.0, 1.0]
    assert reward.__name__ == "pattern" and PatternReward(forbidden="x").__name__ == "forbidden_pattern"
    assert score(pickle.loads(pickle.dumps(reward)), *answers) == score(reward, *answers)


def test_a_format_is_a_pattern_for_the_whole_answer():
    reward = PatternReward(required=[r"(?s)\A<think>.+?</think>\s*<answer>.+?</answer>\s*\Z"], name="format")
    right = "<think>\nso\n</think>\n<answer>4</answer>\n"
    assert score(reward, right, "<answer>4</answer>", f"{right} and more", "") == [1.0, 0.0, 0.0, 0.0]


def test_a_pattern_that_tries_every_way_ends_by_the_policy():
    long, logged = "a" * 100_000, {}
    with pytest.raises(RuntimeError, match=r"required_pattern.*0.1 s on completion 1 \(100,000 characters\)"):
        score(PatternReward(required=[CATASTROPHE], timeout=0.1), "aaA!", long)
    for on_error, expected in (("skip", None), (-1.0, -1.0)):
        reward = PatternReward(required=[CATASTROPHE], timeout=0.1, on_error=on_error)
        start = time.monotonic()
        assert score(reward, "!", long, log_metric=logged.__setitem__) == [0.0, expected]
        assert time.monotonic() - start < 20 and logged == {"rewards/required_pattern/failed": 0.5}


def test_trls_own_rules_are_reachable_from_here():
    assert trl_ext.rewards.get_soft_overlong_punishment is get_soft_overlong_punishment
    assert trl_ext.rewards.get_repetition_penalty_reward is get_repetition_penalty_reward


def test_bad_arguments(subtests):
    for build, error, message in [
        (lambda: PatternReward(), ValueError, "there is no pattern: give"),
        (lambda: PatternReward(required=["("]), ValueError, "is not a regular expression"),
        (lambda: PatternReward(required=[3]), ValueError, "must be a text"),
        (lambda: PatternReward(required=["a"], timeout=0), ValueError, "more than 0 seconds"),
        (lambda: PatternReward(required=["a"], on_error="no"), ValueError, "'raise', 'skip'"),
        (lambda: PatternReward(required=["a"], name="a b"), ValueError, "may have only letters"),
    ]:
        with subtests.test(message=message), pytest.raises(error, match=message):
            build()
