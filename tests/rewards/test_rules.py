"""Patterns as rewards: what they match, and that they cannot hang."""

import pickle
import time

import pytest

from trl_ext.rewards import PatternReward

CATASTROPHE = r"^(([a-z])+.)+[A-Z]([a-z])+$"  # exponential backtracking


def score(reward, *completions, **kwargs):
    return reward(prompts=["p"] * len(completions), completions=list(completions), **kwargs)


def test_each_required_pattern_and_no_forbidden_one():
    reward = PatternReward(required=["please", r"\bthanks\b"], forbidden=[r"(?i)\bkill\b"])
    told = [{"role": "assistant", "content": "please, thanks"}]
    answers = ["please and thanks", "please", "please, thanks, KILL", "please, thanks, skill", told]
    assert score(reward, *answers) == [1.0, 0.0, 0.0, 1.0, 1.0]
    assert reward.__name__ == "pattern" and PatternReward(forbidden="x").__name__ == "forbidden_pattern"
    assert score(pickle.loads(pickle.dumps(reward)), *answers) == score(reward, *answers)


def test_a_format_is_a_pattern_for_the_whole_completion():
    reward = PatternReward(required=[r"(?s)\A<think>.+?</think>\s*<answer>.+?</answer>\s*\Z"], name="format")
    right = "<think>\nso\n</think>\n<answer>4</answer>\n"
    assert score(reward, right, "<answer>4</answer>", f"{right} and more", "") == [1.0, 0.0, 0.0, 0.0]


def test_a_pattern_that_backtracks_is_stopped():
    long, logged = "a" * 100_000, {}
    with pytest.raises(RuntimeError, match=r"required_pattern.*0.1 s on completion 1 \(100,000 characters\)"):
        score(PatternReward(required=[CATASTROPHE], timeout=0.1), "aaA!", long)
    reward = PatternReward(required=[CATASTROPHE], timeout=0.1, on_error="skip")
    start = time.monotonic()
    assert score(reward, "!", long, log_metric=logged.__setitem__) == [0.0, None]
    assert time.monotonic() - start < 20 and logged == {"rewards/required_pattern/failed": 0.5}
