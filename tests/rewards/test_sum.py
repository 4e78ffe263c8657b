"""`SumReward`: the sum worked out by hand, and within a stock trainer."""

import pickle
import threading

import pytest
from trl import GRPOConfig, GRPOTrainer

from tests.tiny import ON_CPU, length_reward, prompts, tiny_llama, tiny_tokenizer
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


def test_members_in_the_background_run_at_the_same_time():
    meeting = threading.Barrier(3)

    def member(name):
        def waits(completions, **kwargs):
            meeting.wait(20)  # raises if the others do not come
            return [1.0] * len(completions)

        waits.in_background, waits.__name__ = name != "here", name
        return waits

    reward = SumReward([member("a"), member("here"), member("b")], name="three")
    assert reward.in_background and not SumReward([tone]).in_background
    assert reward([""], ["a"]) == [3.0] and reward.__name__ == "three"


def test_a_member_that_fails_is_named_or_leaves_no_score():
    def failing(completions, **kwargs):
        raise ConnectionError("no server")

    with pytest.raises(RuntimeError, match="reward 'failing': ConnectionError: no server"):
        SumReward([tone, failing])([""], ["a"])
    assert SumReward([tone, failing], on_error="skip")([""], ["a"]) == [None]
    assert SumReward([tone, failing], on_error=-1.0)([""], ["a"]) == [3.0]


def test_wrong_arguments_are_named(subtests):
    for kwargs, message in [
        ({"members": []}, "`members` must be a list of one or more reward functions, got \\[\\]"),
        ({"members": tone}, "`members` must be a list"),
        ({"members": ["a.b"]}, "a member must be a reward function, got 'a.b'"),
        ({"members": [tone], "weights": [1, 2]}, "`weights` must be a list of 1 finite numbers"),
        ({"members": [tone], "means": [True]}, "`means` must be a list of 1 finite numbers"),
        ({"members": [tone], "stds": [0]}, "`stds` must be above 0, got"),
        ({"members": [tone], "on_error": "ignore"}, "`on_error` must be 'raise', 'skip' or a finite number"),
    ]:
        with subtests.test(message), pytest.raises((TypeError, ValueError), match=message):
            SumReward(**kwargs)


def test_a_stock_trainer_trains_on_it(tmp_path):
    reward = pickle.loads(pickle.dumps(SumReward([length_reward, asked], weights=[1.0, 0.1])))
    trainer = GRPOTrainer(
        model=tiny_llama(),
        reward_funcs=[reward],
        args=GRPOConfig(
            str(tmp_path),
            **ON_CPU,
            per_device_train_batch_size=4,
            num_generations=2,
            max_completion_length=4,
            max_steps=1,
        ),
        train_dataset=prompts(8),
        processing_class=tiny_tokenizer(),
    )
    trainer.train()
    log, name = trainer.state.log_history[0], "rewards/sum_length_reward_asked"
    parts = log[f"{name}/length_reward/mean"] + 0.1 * log[f"{name}/asked/mean"]
    assert log[f"{name}/mean"] == pytest.approx(parts, rel=1e-5)
