"""Reward functions within others: async ones, failing ones, and ones in the background."""

import asyncio
import math
import threading

import pytest

from trl_ext.rewards import (
    ConstitutionReward,
    EnsembleReward,
    Member,
    RewardFailed,
)
from trl_ext.rewards.background import Started, awaited, runs_in_background
from trl_ext.rewards.member import failed_rows


class KeepsAClient:
    """Async, with an object of one event loop, like a client's connections."""

    def __init__(self):
        self.client = None

    async def __call__(self, completions, **kwargs):
        loop = asyncio.get_running_loop()
        self.client = self.client or loop
        assert self.client is loop, "the client is of a loop that is closed"
        return [1.0] * len(completions)


def test_an_async_function_keeps_its_event_loop():
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


def test_an_async_function_that_exits_blocks_no_caller():
    async def leaving(**kwargs):
        raise SystemExit(3)

    with pytest.raises(RuntimeError, match=r"SystemExit\(3\)"):
        awaited(leaving())
    assert awaited(asyncio.sleep(0, 1)) == 1  # the loop still runs


def unlucky(completions, **kwargs):
    return [{"nan": math.nan, "text": "1", "tokens": [1.0]}.get(c, 0.5) for c in completions]


def raising(completions, **kwargs):
    raise KeyError("no such key")


def short(completions, **kwargs):
    return [1.0]


def test_a_members_errors_are_named_or_skipped(subtests):
    good_and_bad = ["fine", "nan", "text", "tokens"]
    for function, message, failed in [
        (unlucky, "reward 'unlucky': ValueError: returned nan for completion 1", [1, 2, 3]),
        (raising, "reward 'raising': KeyError: 'no such key'", [0, 1, 2, 3]),
        (short, "reward 'short': ValueError: must return .* 4 in all; got 1", [0, 1, 2, 3]),
    ]:
        with subtests.test(function.__name__):
            with pytest.raises(RuntimeError, match=message):
                Member(function)([""] * 4, good_and_bad)
            logged = {}
            scores = Member(function, "skip")([""] * 4, good_and_bad, log_metric=logged.__setitem__)
            assert scores == [None if row in failed else 0.5 for row in range(4)]
            assert logged == {f"rewards/{function.__name__}/failed": len(failed) / 4}
    with pytest.raises(ValueError, match="give 'raise' or 'skip'"):
        Member(unlucky, "skips")


def served(completions, **kwargs):
    raise RewardFailed("reward 'served': completion 0: http://127.0.0.1: status 503")


class Meeting:
    """Runs in the background until the other one is called, too."""

    in_background = True

    def __init__(self, name, door):
        self.__name__, self.door = name, door

    def __call__(self, completions, **kwargs):
        self.door.wait(20)
        return [1.0] * len(completions)


@pytest.mark.parametrize("kind", ["ensemble", "constitution"])
def test_background_members_run_at_the_same_time_in_every_wrapper(kind):
    door = threading.Barrier(2)
    both = [Meeting("a", door), Meeting("b", door)]
    reward = {
        "ensemble": lambda: EnsembleReward(both),
        "constitution": lambda: ConstitutionReward(both[0], both[1:]),
    }[kind]()
    assert runs_in_background(reward) and reward([""], ["a"]) == [1.0]


class Wrapper:
    """A user's own."""

    def __init__(self, inner):
        self.inner = inner

    def held(self):
        return [self.inner]

    def __call__(self, **kwargs):
        return self.inner(**kwargs)


def test_a_wrapper_is_as_what_it_says_it_holds():
    inner = Member(raising, on_error="skip")
    assert not runs_in_background(Wrapper(Wrapper(inner))) and runs_in_background(Wrapper(Wrapper(Meeting("a", None))))
    assert failed_rows(Wrapper(Wrapper(inner)), [None, 1.0]) == [True, False]
    assert failed_rows(Wrapper(raising), [None, 1.0]) == [False, False]
