"""Rewards in the background: started when generation ends, awaited after our passes, with the same results."""

import asyncio

import pytest
import torch

from tests.tiny import length_reward, prompts, tiny_ppo, weights, without_clock


class Recorded:
    """Scores lengths, logs a column and a metric, and keeps its arguments."""

    def __init__(self, in_background):
        self.in_background = in_background
        self.__name__ = "noting"
        self.calls = []

    def __call__(self, completions, log_metric, log_extra, **kwargs):
        self.calls.append({"completions": completions, "log_metric": log_metric, "log_extra": log_extra, **kwargs})
        scores = length_reward(completions)
        log_metric("noted", scores[0])
        log_extra(column="score", values=scores)
        return [None if score == 3.0 else score for score in scores]


class RecordedAsync(Recorded):
    async def __call__(self, completions, **kwargs):  # an async function needs no attribute
        await asyncio.sleep(0)
        return super().__call__(completions, **kwargs)


def end_of(tmp_path, reward):
    trainer = tiny_ppo(
        tmp_path,
        None,
        [reward, length_reward],
        reward_weights=[1.0, 0.5],
        eval_strategy="steps",
        eval_steps=2,
        eval_dataset=prompts(6, seed=3),
        missing_eos_penalty=1.0,
    )
    trainer.train()
    speed = ("runtime", "per_second")
    logs = [
        {name: value for name, value in without_clock(log).items() if not name.endswith(speed)}
        for log in trainer.state.log_history
    ]
    return weights(trainer), logs, trainer


@pytest.mark.slow
def test_a_background_reward_changes_only_the_time(tmp_path):
    rewards = [Recorded(in_background=False), Recorded(in_background=True), RecordedAsync(in_background=False)]
    (here, logs, _), *others = [end_of(tmp_path, reward) for reward in rewards]
    for there, their_logs, trainer in others:
        torch.testing.assert_close(there, here, rtol=0, atol=0)
        assert their_logs == logs and any("noted" in log for log in logs)
        assert any("time/score_wait" in log for log in trainer.state.log_history)
        assert list(trainer._logs["extra"]["score"])
    for other in rewards[1:]:
        assert len(other.calls) == len(rewards[0].calls) > 2  # a rollout and two evaluations
        for mine, theirs in zip(rewards[0].calls, other.calls, strict=True):
            loggers = {"log_metric", "log_extra", "trainer_state"}
            assert mine.keys() == theirs.keys() >= {"prompts", "topic", "prompt_ids", "finished", *loggers}
            assert all(mine[name] == theirs[name] for name in mine.keys() - loggers)
    call = rewards[0].calls[0]
    assert call["finished"] == [ids[-1] == 2 for ids in call["completion_ids"]]


def test_an_error_in_the_background_is_named_and_no_call_is_left(tmp_path):
    calls = []

    class Failing(Recorded):
        def __call__(self, completions, **kwargs):
            calls.append(completions)
            if len(calls) == 1:
                raise ConnectionError("no server")
            return [float(len(calls))] * len(completions)

    trainer = tiny_ppo(tmp_path, None, Failing(in_background=True), max_steps=1)
    with pytest.raises(RuntimeError, match="At step 0, process 0: reward function 'noting': ConnectionError: no s"):
        trainer.train()

    passes, trainer._passes = trainer._passes, lambda *args, **kwargs: 1 / 0
    with pytest.raises(ZeroDivisionError):  # nothing waits for the scores of the second call
        trainer.train()
    trainer._passes = passes
    trainer.train()
    assert trainer.state.log_history[0]["rewards/noting/mean"] == 3.0
