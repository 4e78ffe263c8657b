"""A failing member never raises a score: no wrapper scores a completion higher than with all members' scores."""

import itertools
import math
import random

import pytest

from trl_ext.rewards import CachedReward, ConstitutionReward, EnsembleReward, ScoreWatch
from trl_ext.rewards.member import MarksFailures

ROWS = 60
HELD = ("a", "b", "c")
LATE = {row for row in range(ROWS) if row % 3 == 0}  # the rows that fail, where not all do


class Scorer:
    """Random scores in [-5, 5]; a completion is the number of its row."""

    def __init__(self, name, fails):
        rng = random.Random(name)
        self.__name__, self.fails = name, fails
        self.scores = [rng.uniform(-5, 5) for _ in range(ROWS)]
        self.on_error = "skip" if fails == "by its own skip" else "raise"
        self.in_background = fails == "in the background"

    def __call__(self, prompts, completions, **kwargs):
        if self.fails in ("as a whole", "in the background"):
            raise TimeoutError("no answer")
        missing = {"by row": math.nan, "by its own skip": None}
        rows = map(int, completions)
        return [missing[self.fails] if self.fails and row in LATE else self.scores[row] for row in rows]


HOLDING = {
    **{
        f"{combine}{'' if bound is None else ' with a bound'}": lambda *held, combine=combine, bound=bound: (
            EnsembleReward(held, combine, max_disagreement=bound, on_error="skip")
        )
        for combine, bound in itertools.product(("mean", "median", "min", "uncertainty"), (None, 2.5))
    },
    "principles": lambda a, b, c: ConstitutionReward(a, [b], cap=-1.0, minimum=-2.0, judge=c, on_error="skip"),
    "ensemble of others": lambda a, b, c: EnsembleReward(
        [EnsembleReward([a, b], on_error="skip"), ScoreWatch(c)], on_error="skip"
    ),
    "principles on an ensemble": lambda a, b, c: ConstitutionReward(
        EnsembleReward([a, b], on_error="skip"), [c], cap=-1.0, minimum=-2.0, on_error="skip"
    ),
    "cached": lambda a, b, c: EnsembleReward([CachedReward(a), CachedReward(b), c], on_error="skip"),
}


@pytest.mark.parametrize("how", ["as a whole", "by row", "by its own skip", "in the background"])
@pytest.mark.parametrize("holding", HOLDING)
def test_with_members_that_fail_a_score_is_none_or_no_higher(holding, how):
    def scores(failing):
        reward = HOLDING[holding](*(Scorer(name, how if name in failing else None) for name in HELD))
        return reward(prompts=[""] * ROWS, completions=[str(row) for row in range(ROWS)])

    whole = scores(())
    assert any(score is not None for score in whole)
    for count in (1, 2, 3):
        for failing in itertools.combinations(HELD, count):
            for row, (all_answer, some_fail) in enumerate(zip(whole, scores(failing), strict=True)):
                assert some_fail is None or all_answer is not None and some_fail <= all_answer, (failing, row)
                is_told_apart = how in ("by row", "by its own skip") and (holding, how) != ("cached", "by row")
                if is_told_apart and row not in LATE:  # the other rows have their usual score
                    assert some_fail == all_answer, (failing, row)


def test_a_score_that_a_judge_withholds_stays_missing_through_a_cache():
    asked = []

    class Withholds(MarksFailures):
        def scores_or_nan(self, prompts, completions, **kwargs):
            asked.append(completions)
            return [None if completion == "0" else math.nan for completion in completions]

    cached = CachedReward(Withholds(), columns=[])
    capped = ConstitutionReward(Scorer("a", None), [cached], on_error="skip")
    for _ in range(2):  # a failure is not cached
        assert capped(prompts=["", ""], completions=["0", "1"])[1] is None
        assert cached(prompts=["", ""], completions=["0", "1"]) == [None, None]
    assert asked == [["0", "1"]] * 4


def test_a_rejected_row_fails_and_one_without_a_reward_does_not():
    """PPO masks out a failed row. A row to which a reward does not apply is trained on with the other rewards."""

    def gives(*scores):
        return lambda completions, **kwargs: list(scores)

    def found(reward):
        return ["fails" if score != score else score for score in reward.scores_or_nan([""] * 4, [""] * 4)]

    low, high = gives(1.0, 1.0, 1.0, None), gives(1.0, 9.0, None, None)
    assert found(EnsembleReward([low, high], max_disagreement=2.0)) == [1.0, "fails", "fails", None]
    assert found(ConstitutionReward(low, [high], cap=0.0, minimum=2.0)) == [0.0, 1.0, "fails", None]
    assert found(ConstitutionReward(low, [gives(2.0, 2.0, 2.0, 2.0)])) == [1.0, 1.0, 1.0, None]
    silent = ConstitutionReward(low, judge=gives(None, 2.0, 0.0, None), cap=0.0)
    assert found(silent) == ["fails", 1.0, 0.0, None]
    assert found(ScoreWatch(EnsembleReward([low, high], max_disagreement=2.0))) == [1.0, "fails", "fails", None]
