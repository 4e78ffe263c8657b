"""Attribution of a reward: features by hand, effects by a slow reference, invariances."""

import json

import numpy as np
import pytest

from tests.callbacks.policies import Policy, trained
from trl_ext.evaluation import Sums, features_of, reward_attribution
from trl_ext.evaluation.attribution import FIXED, is_expected


def summed(rollouts, sums=None):
    sums = sums or Sums()
    for each in rollouts:
        sums.add(features_of(each["prompts"], each["completions"]), each["scores"], each["prompts"])
    return sums


def worded(shares, score=lambda has: has, prompts=8, generations=8):
    """Rollouts in which these shares of each prompt's completions have the word "yes"."""
    for share in shares:
        has = [place < share * generations for place in range(generations)] * prompts
        texts = [f"a{place} b{place} {'yes' if one else 'no'} c{place}" for place, one in enumerate(has)]
        asked = [f"q{place // generations}" for place in range(len(has))]
        yield {"prompts": asked, "completions": texts, "scores": [float(score(one)) for one in has]}


def test_features_by_hand():
    prompts = ["Tell me of the cats", "tell me of the dog"]
    cat, dog = features_of(prompts, ["The cats, the cats! OK OK 12", ""], [[False, True], []])
    assert cat["length"] == 7 and cat["words of the prompt"] == 2  # "the" is too short
    # Of "the cats|cats ,|, the|the cats|cats !|! ok|ok ok|ok 12" one of eight is a repetition
    assert cat["repetition"] == 100 / 8 and cat["a word of the prompt repeated"] == 1
    assert cat["digits"] == pytest.approx(100 * 2 / 28) and cat["character:t"] == pytest.approx(100 * 4 / 28)
    assert cat["capital letters"] == pytest.approx(100 * 5 / 28)
    assert cat["tool calls"] == 2 and cat["repeated tool calls"] == 1
    assert cat["phrase:the cats"] == cat["phrase:cats , the cats"] == cat["phrase:!"] == 1
    assert dog["empty answers"] == 1 and {name for name, value in dog.items() if value} == {"empty answers"}


def test_the_effect_of_the_only_rewarded_word():
    """
    In each of 8 groups of 8, 0 then 4 completions have it. It is worth 2, less the ridge's thousandth. Each rollout
    has twice the weight of the one before, so its share is (0 + 2 · ½ + 4 · ½ + 8 · ½) / 15.
    """
    found = reward_attribution(summed(worded([0.0, 0.5, 0.5, 0.5], lambda has: 1 + 2 * has)))
    (paid,) = found.paid
    assert paid.name == "phrase:yes" and (paid.first, paid.now) == pytest.approx((0, 7 / 15))
    assert paid.effect == pytest.approx(2 / 1.001) and paid.paid == pytest.approx(2 / 1.001 * 7 / 15)
    assert found.rise == pytest.approx(14 / 15) and paid.part == pytest.approx(1 / 1.001)
    assert paid.in_words(found.sigma).startswith("The phrase 'yes': 0% → 47% of completions, worth +")


def test_effects_are_those_of_a_regression_within_prompts():
    rollouts = list(trained(Policy("copy"), 8))
    sums = summed(rollouts)
    found = reward_attribution(sums)
    names = [paid.name for paid in found.paid]
    inner, scores = [], []
    for each in rollouts:
        rows = features_of(each["prompts"], each["completions"])
        x = np.array([[row.get(name, 0) for name in names] for row in rows])
        y, asked = np.array(each["scores"]), np.array(each["prompts"])
        for prompt in {*each["prompts"]}:
            inner.append(x[asked == prompt] - x[asked == prompt].mean(0))
            scores.append(y[asked == prompt] - y[asked == prompt].mean())
    groups = len(inner)
    x, y = np.vstack(inner), np.concatenate(scores)
    ridge = np.diag(np.sqrt(0.001 * (x**2).sum(0)))  # they count as rows with a score of 0
    slow = np.linalg.lstsq(np.vstack([x, ridge]), np.append(y, np.zeros(len(names))), rcond=None)
    assert np.allclose([paid.effect for paid in found.paid], slow[0])
    assert found.sigma == pytest.approx(np.sqrt((y**2).sum() / (8 * 64 - groups)))
    assert sum(paid.part for paid in found.paid) == pytest.approx(1, abs=0.1)


def test_a_feature_that_only_occurs_with_a_rewarded_one_has_no_effect():
    """A phrase of three words contains six phrases, and makes the completion longer."""
    found = reward_attribution(summed(trained(Policy("phrase"), 12)))
    assert found.paid[0].name == "phrase:i love you" and found.paid[0].part > 0.9
    assert sum(abs(paid.part) for paid in found.paid[1:]) < 0.1


def test_invariances():
    rollouts = list(trained(Policy("copy"), 6))
    whole = summed(rollouts)
    first = reward_attribution(whole)

    half = summed(rollouts[:3])
    sums = summed(rollouts[3:], Sums(json.loads(json.dumps(half.dump()))))  # a restart
    assert sums.dump() == whole.dump()

    def changed(each, order, scale, plus):
        return {name: [column[at] for at in order] for name, column in each.items()} | {
            "scores": [scale * each["scores"][at] + plus for at in order]
        }

    back = reward_attribution(summed(changed(each, range(64)[::-1], 10, -3) for each in rollouts))
    assert [paid.name for paid in back.paid] == [paid.name for paid in first.paid]
    assert np.allclose([paid.part for paid in back.paid], [paid.part for paid in first.paid])
    assert back.rise == pytest.approx(10 * first.rise) and back.sigma == pytest.approx(10 * first.sigma)


def test_memory_is_constant():
    sums, sizes = Sums(), []
    for rollout in range(8):  # 200 other words each time
        texts = [" ".join(f"w{rollout}x{at}" for at in range(200))] * 16
        sums.add(features_of(["q"] * 16, texts), range(16), ["q"] * 16)
        sizes.append((len(sums.names), len(sums.first)))
    assert sizes[3:] == [(160, sizes[3][1])] * 5 and sums.gram.shape == (160, 160)


@pytest.mark.parametrize(
    ("shares", "score"),
    [([0.0, 0.0], lambda has: 0), ([0.5, 0.5], lambda has: 7), ([1.0, 1.0], lambda has: has), ([0.0, 1.0], float)],
)
def test_scores_that_are_equal_within_prompts_explain_nothing(shares, score):
    assert reward_attribution(summed(worded(shares, score))).paid == []


def test_rare_scores_and_rare_features_explain_nothing():
    """One completion of 64 scores 1; no other has its words."""
    sums = summed({**each, "scores": [1.0] + [0.0] * 63} for each in worded([0.5] * 3))
    assert reward_attribution(sums).paid == []


def test_expected_features_explain_first():
    rollouts = list(trained(Policy("phrase"), 12))
    found = reward_attribution(summed(rollouts), ["length"])
    assert {paid.name for paid in found.paid[:2]} == {"phrase:i love you", "length"}
    assert is_expected("phrase:love you", ["phrase:I love you"]) and is_expected("phrase:we i love you", ["phrase"])
    assert not is_expected("phrase:love", ["phrase:lovely"]) and not is_expected("length", ["phrase:length"])
    assert is_expected("character:e", ["character"]) and all(is_expected(name, [name]) for name in FIXED)
