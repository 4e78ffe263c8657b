"""Reward functions within others: async ones, those that fail, and those that run elsewhere."""

import asyncio
import math
import os
import threading

import pytest

from trl_ext.rewards import (
    CachedReward,
    ConstitutionReward,
    EnsembleReward,
    Member,
    RewardFailed,
    SumReward,
)
from trl_ext.rewards.background import Started, awaited


class KeepsAClient:
    """Async, with something that belongs to one event loop, as a client's connections do."""

    def __init__(self):
        self.client = None

    async def __call__(self, completions, **kwargs):
        loop = asyncio.get_running_loop()
        self.client = self.client or loop
        assert self.client is loop, "the client is of a loop that is closed"
        return [1.0] * len(completions)


def test_an_async_function_keeps_its_event_loop_wherever_it_is_called_from():
    reward = KeepsAClient()
    member = Member(reward)

    async def from_a_notebook():
        return member(["p"], ["c"])

    assert (
        member(["p"], ["c"])
        == asyncio.run(from_a_notebook())
        == Started(member, prompts=["p"], completions=["c"]).result()
        == [1.0]
    )


def test_an_async_function_may_call_a_reward_with_an_async_member():
    """Within the loop itself, where waiting for the loop would be waiting for ever."""
    inner = Member(lambda completions, **_: asyncio.sleep(0, [2.0] * len(completions)))

    async def outer(completions, **kwargs):
        return inner([""], completions)

    assert Member(outer)([""], ["a"]) == [2.0]


def test_an_async_function_that_leaves_the_program_leaves_nobody_waiting():
    async def leaving(**kwargs):
        raise SystemExit(3)

    with pytest.raises(RuntimeError, match=r"SystemExit\(3\)"):
        awaited(leaving())
    assert awaited(asyncio.sleep(0, 1)) == 1  # the loop goes on


def test_a_forked_process_has_a_loop_of_its_own():
    assert awaited(asyncio.sleep(0, 1)) == 1
    child = os.fork()
    if child == 0:
        os._exit(awaited(asyncio.sleep(0, 7)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def unlucky(completions, **kwargs):
    return [{"nan": math.nan, "text": "1", "tokens": [1.0]}.get(c, 0.5) for c in completions]


def raising(completions, **kwargs):
    raise KeyError("no such key")


def short(completions, **kwargs):
    return [1.0]


def test_what_a_member_does_wrong_is_named_skipped_or_scored(subtests):
    good_and_bad = ["fine", "nan", "text", "tokens"]
    for function, message, failed in [
        (unlucky, "reward 'unlucky': ValueError: returned nan for completion 1", [1, 2, 3]),
        (raising, "reward 'raising': KeyError: 'no such key'", [0, 1, 2, 3]),
        (short, "reward 'short': ValueError: returned 1 rewards for 4 completions", [0, 1, 2, 3]),
    ]:
        with subtests.test(function.__name__):
            with pytest.raises(RuntimeError, match=message):
                Member(function)([""] * 4, good_and_bad)
            for policy, value in (("skip", None), (-2, -2.0)):
                logged = {}
                scores = Member(function, policy)([""] * 4, good_and_bad, log_metric=logged.__setitem__)
                assert scores == [value if row in failed else 0.5 for row in range(4)]
                assert logged == {f"rewards/{function.__name__}/failed": len(failed) / 4}


def served(completions, **kwargs):
    raise RewardFailed("reward 'served': completion 0: http://127.0.0.1: status 503")


def test_a_reward_that_says_why_it_failed_is_named_once_however_deep(subtests):
    said = "reward 'served': completion 0: http://127.0.0.1: status 503"
    for function, expected in (
        (Member(served), said),
        (CachedReward(served), said),
        (Member(SumReward([served], name="sum")), f"reward 'sum': {said}"),
    ):
        with subtests.test(expected), pytest.raises(RewardFailed) as error:
            function([""], ["answer"])
        assert str(error.value).startswith(expected) and str(error.value).count("served") == 1


def test_what_a_started_function_logs_is_handed_on_when_it_is_awaited():
    def reward(completions, log_metric, log_extra, **kwargs):
        log_metric("a", 1.0)
        log_extra(column="b", values=[2.0])
        raise ValueError("after that")

    logged, columns = {}, {}
    started = Started(reward, completions=["c"])
    with pytest.raises(ValueError, match="after that"):
        started.result(logged.__setitem__, lambda column, values: columns.update({column: values}))
    assert logged == {"a": 1.0} and columns == {"b": [2.0]}


class Meeting:
    """In the background, until the other one is called, too."""

    in_background = True

    def __init__(self, name, door):
        self.__name__, self.door = name, door

    def __call__(self, completions, **kwargs):
        self.door.wait(20)
        return [1.0] * len(completions)


@pytest.mark.parametrize("kind", ["sum", "ensemble", "constitution"])
def test_members_in_the_background_run_at_the_same_time_in_every_wrapper(kind):
    door = threading.Barrier(2)
    both = [Meeting("a", door), Meeting("b", door)]
    reward = {
        "sum": lambda: SumReward(both),
        "ensemble": lambda: EnsembleReward(both),
        "constitution": lambda: ConstitutionReward(both[0], both[1:]),
    }[kind]()
    assert reward.in_background and reward([""], ["a"]) == [2.0 if kind == "sum" else 1.0]


def test_a_reward_is_warned_of_when_it_first_fails_and_when_it_first_fails_on_all_rows(monkeypatch):
    said, broken = [], [set(), {0}, {0}, {0, 1}, {0, 1}, set(), {0, 1}]
    monkeypatch.setattr("trl_ext.rewards.member.logger.warning", said.append)

    def flaky(completions, **kwargs):
        wrong = broken.pop(0)
        return ["x" if row in wrong else 1.0 for row in range(len(completions))]

    member = Member(flaky, on_error="skip")
    for _ in range(7):
        member(prompts=["p", "p"], completions=["a", "b"])
    starts = [f"reward 'flaky' failed on {count} of 2 completions: returned 'x' for completion 0" for count in (1, 2)]
    assert [text.split(";")[0] for text in said] == starts
