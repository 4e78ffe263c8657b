"""The baseline of advantages: closed forms, and the same weight however the answers are cut into parts."""

import pytest
import torch
from torch.testing import assert_close

from trl_ext.functional import critic_products, critic_weight, mean_baselines, weight_sums

MASK = torch.arange(5) < torch.tensor([5, 3, 1, 0, 4]).unsqueeze(1)


def drawn():
    torch.manual_seed(0)
    return torch.randn(3, 5, 5, dtype=torch.float64).unbind()


def slow_means(returns, mask, size):
    """By loops: what the others had still to get at the action with the same number, or at their last one."""
    lists = [row[each].tolist() for row, each in zip(returns, mask, strict=True)]
    means = torch.full_like(returns, returns[mask].mean().item())
    for i in range(len(lists)):
        group = range(i // size * size, (i // size + 1) * size)
        others = [lists[j] for j in group if j != i and lists[j]]
        for t in range(returns.size(1)):
            number = max(int(mask[i, : t + 1].sum()) - 1, 0)
            if others:
                means[i, t] = sum(each[min(number, len(each) - 1)] for each in others) / len(others)
    return means


@pytest.mark.parametrize("size", [None, 5, 1])
def test_an_answer_is_compared_with_the_others_at_the_same_action(size):
    returns, _, _ = drawn()
    gaps = torch.rand(5, 5, generator=torch.Generator().manual_seed(1)) < 0.6  # between them an environment speaks
    for mask in (MASK, MASK & gaps):
        expected = slow_means(returns, mask, size or 5)
        assert_close(mean_baselines(returns, mask, size)[mask], expected[mask])
        hidden = returns.masked_fill(~mask, float("nan"))
        assert_close(mean_baselines(hidden, mask, size), mean_baselines(returns, mask, size))


def test_groups_are_prompts_and_one_score_makes_the_baseline_of_rloo():
    returns, mask = drawn()[0][:4], MASK[[0, 1, 2, 4]]
    assert_close(mean_baselines(returns, mask, 2)[mask], slow_means(returns, mask, 2)[mask])
    scores = torch.tensor([1.0, 2.0, 4.0, 9.0])
    means = mean_baselines(scores[:, None].expand(4, 5), mask)
    assert_close(means, ((scores.sum() - scores) / 3)[:, None].expand(4, 5))
    returns[1] += 100  # no answer's own returns are in what it is compared with
    assert_close(mean_baselines(returns, mask)[1], mean_baselines(drawn()[0][:4], mask)[1])
    assert_close(mean_baselines(torch.zeros(1, 2), torch.zeros(1, 2)), torch.zeros(1, 2))
    with pytest.raises(ValueError, match="group_size must divide the N = 4 answers, got 3"):
        mean_baselines(means, mask, group_size=3)


def test_the_weight_is_the_slope_of_a_regression_with_an_intercept():
    returns, values, _ = drawn()
    values, means = 0.7 * values + 0.5 * returns + 3, drawn()[2]
    gains, signals = ((x - means)[MASK] for x in (returns, values))
    lines = torch.stack([signals, torch.ones_like(signals)], dim=1)
    slope = torch.linalg.lstsq(lines, gains[:, None]).solution[0].item()
    assert 0 < slope < 1
    assert critic_weight(critic_products(weight_sums(returns, values, means, MASK))) == pytest.approx(slope)
    # Above a half exactly where the critic leaves less variance than the mean does
    assert (slope > 0.5) == ((gains - signals).var() < gains.var()).item()


@pytest.mark.parametrize(
    ("share", "weight"),
    [
        (1.0, 1.0),  # the returns themselves
        (0.5, 1.0),  # too timid: the slope is 2
        (2.0, 0.5),  # too bold
        (-1.0, 0.0),  # the opposite
        (0.0, 0.0),  # a constant
    ],
)
def test_the_weight_of_worked_critics(share, weight):
    returns, mask = torch.tensor([[3.0], [-1.0]]), torch.ones(2, 1)
    sums = weight_sums(returns, 7 + share * returns, torch.ones(2, 1), mask)
    assert critic_weight(critic_products(sums)) == pytest.approx(weight)


def test_sums_of_parts_are_those_of_the_whole_and_garbage_under_the_mask_is_not_read():
    returns, values, means = drawn()
    whole = weight_sums(returns, values, means, MASK)
    parts = [weight_sums(returns[rows], values[rows], means[rows], MASK[rows]) for rows in ([0, 3], [1, 2, 4])]
    assert_close(sum(parts), whole)
    hidden = values.masked_fill(~MASK, float("nan"))
    assert_close(weight_sums(returns.masked_fill(~MASK, torch.inf), hidden, means, MASK), whole)
