"""Rewards whose time goes by elsewhere: started when generation ends, awaited after the passes, with equal results."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.ppo.worker import make_trainer, weights, without_clock
from tests.tiny import length_reward, prompts
from trl_ext.rewards import SumReward

TIMEOUT = 20.0  # seconds, of what would wait for ever if it were not so


class Noting:
    """Scores lengths, logs something, and keeps what it was called with."""

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


class NotingAsync(Noting):
    async def __call__(self, completions, **kwargs):  # what is async needs no attribute
        await asyncio.sleep(0)
        return super().__call__(completions, **kwargs)


def end_of(tmp_path, reward):
    trainer = make_trainer(
        tmp_path,
        [reward, length_reward],
        reward_weights=[1.0, 0.5],
        eval_strategy="steps",
        eval_steps=2,
        trainer_kwargs={"train_dataset": prompts(), "eval_dataset": prompts(6, seed=3)},
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
def test_the_background_changes_nothing_but_the_time(tmp_path):
    rewards = [Noting(in_background=False), Noting(in_background=True), NotingAsync(in_background=False)]
    (here, logs, _), *others = [end_of(tmp_path, reward) for reward in rewards]
    for there, their_logs, trainer in others:
        torch.testing.assert_close(there, here, rtol=0, atol=0)
        assert their_logs == logs and any("noted" in log for log in logs)
        assert any("time/score_wait" in log for log in trainer.state.log_history)
        assert list(trainer._logs["extra"]["score"])
    for other in rewards[1:]:
        assert len(other.calls) == len(rewards[0].calls) > 4
        for mine, theirs in zip(rewards[0].calls, other.calls, strict=True):
            loggers = {"log_metric", "log_extra", "trainer_state"}
            assert mine.keys() == theirs.keys() >= {"prompts", "topic", "prompt_ids", "finished", *loggers}
            assert all(mine[name] == theirs[name] for name in mine.keys() - loggers)
    greedy = [call for call in rewards[0].calls if "is_greedy" in call]
    assert greedy and all(all(call["is_greedy"]) for call in greedy)
    call = rewards[0].calls[0]
    assert call["finished"] == [ids[-1] == 2 for ids in call["completion_ids"]]


class Awaiting:
    """In the background, until something has happened that happens only if nobody waits for this function."""

    in_background = True
    __name__ = "awaiting"

    def __init__(self):
        self.happened = threading.Event()

    def __call__(self, completions, **kwargs):
        return [1.0 if self.happened.wait(TIMEOUT) else -1.0] * len(completions)


def test_passes_and_other_rewards_run_meanwhile(tmp_path):
    for_passes, for_reward = Awaiting(), Awaiting()
    both = SumReward([Awaiting(), length_reward])  # in the background, since a member is

    def foreground(completions, **kwargs):
        for_reward.happened.set()
        return length_reward(completions)

    trainer = make_trainer(tmp_path, [for_passes, for_reward, both, foreground], max_steps=1)
    passes = trainer._passes

    def noted(*args, **kwargs):
        for_passes.happened.set()
        both.members[0].function.happened.set()
        return passes(*args, **kwargs)

    noted.__dict__.update(vars(passes))
    trainer._passes = noted
    trainer.train()
    log = trainer.state.log_history[0]
    names = ["awaiting_0", "awaiting_1", "foreground"]
    assert [log[f"rewards/{name}/mean"] for name in names[:2]] == [1.0, 1.0]
    assert log["rewards/sum_awaiting_length_reward/awaiting/mean"] == 1.0
    assert log["rewards/foreground/mean"] == log["rewards/sum_awaiting_length_reward/length_reward/mean"] > 1


def test_what_fails_in_the_background_is_named_and_leaves_nothing_behind(tmp_path):
    calls = []

    class Failing(Noting):
        def __call__(self, completions, **kwargs):
            calls.append(completions)
            if len(calls) == 1:
                raise ConnectionError("no server")
            return [float(len(calls))] * len(completions)

    trainer = make_trainer(tmp_path, Failing(in_background=True), max_steps=1)
    with pytest.raises(RuntimeError, match="At step 0, process 0: reward function 'noting': ConnectionError: no s"):
        trainer.train()

    passes, trainer._passes = trainer._passes, lambda *args, **kwargs: 1 / 0
    with pytest.raises(ZeroDivisionError):  # the second call is never asked for its scores
        trainer.train()
    trainer._passes = passes
    trainer.train()
    assert trainer.state.log_history[0]["rewards/noting/mean"] == 3.0


@pytest.mark.slow
def test_ctrl_c_ends_a_run_that_waits():
    """And the threads that go on, of functions that are async or not, do not keep the program."""
    code = (
        "import asyncio, signal, threading, time\n"
        # A test run in the background ignores it, and passes that on
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from trl_ext.rewards.background import Started\n"
        "ready = threading.Event()\n"
        "async def later(**kwargs):\n    ready.set()\n    await asyncio.sleep(600)\n"
        "def judge(**kwargs):\n    ready.wait()\n    print('asked', flush=True)\n    time.sleep(600)\n"
        "scores = [Started(later), Started(judge)]\n"
        "[each.result() for each in scores]\n"
    )
    root = Path(__file__).parents[2]
    run = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stdout.readline() == "asked\n"
    began = time.monotonic()
    run.send_signal(signal.SIGINT)
    _, error = run.communicate(timeout=TIMEOUT)
    assert error.strip().endswith("KeyboardInterrupt") and time.monotonic() - began < TIMEOUT
