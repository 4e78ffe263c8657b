"""`SumReward`: the sum worked out by hand, and within a stock trainer."""

import pytest

from trl_ext.rewards import SumReward


def tone(completions, **kwargs):
    return [{"a": 4.0, "b": 6.0}.get(text) for text in completions]


def safety(completions, **kwargs):
    return [-1.0 if "kill" in text else None for text in completions]


async def asked(completions, **kwargs):
    return [float(len(text)) for text in completions]


def test_members_are_standardised_weighted_and_added_up_where_they_apply():
    logged = {}
    reward = SumReward([tone, safety, asked], weights=[2.0, 3.0, 0.0], means=[5.0, 0.0, 0.0], stds=[0.5, 1.0, 1.0])
    answers = ["a", "b", "kill", "c"]
    scores = reward([""] * 4, answers, log_metric=logged.__setitem__)
    # 2 (4 - 5) / 0.5; 2 (6 - 5) / 0.5; 3 (-1); and of weight 0 alone, which only measures
    assert scores == [-4.0, 4.0, -3.0, None]
    where = "rewards/sum_tone_safety_asked"
    assert logged == {
        f"{where}/tone/mean": 5.0,
        f"{where}/tone/std": 1.0,
        f"{where}/safety/mean": -1.0,
        f"{where}/safety/std": 0.0,
        f"{where}/asked/mean": 1.75,
        f"{where}/asked/std": pytest.approx(1.299, abs=1e-3),
    }
    assert SumReward([tone, safety])([""] * 4, answers) == [4.0, 6.0, -1.0, None]  # None where nobody scores
    # Who runs in the background keeps its place, and its weight
    assert SumReward([asked, tone], weights=[1.0, 10.0])([""] * 4, answers) == [41.0, 61.0, 4.0, 1.0]


def test_a_score_depends_on_its_row_alone():
    reward, answers = SumReward([tone, safety, asked], means=[1.0, 2.0, 3.0]), ["a", "kill", "b"]
    assert [reward([""], [answer])[0] for answer in answers] == reward([""] * 3, answers)
