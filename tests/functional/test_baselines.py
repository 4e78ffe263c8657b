"""The baseline of advantages: closed forms, and the same weight for any split of the rows."""

import pytest
import torch
from torch.testing import assert_close

from trl_ext.functional import critic_products, critic_weight, mean_baselines

MASK = torch.arange(5) < torch.tensor([5, 3, 1, 0, 4]).unsqueeze(1)


def random_inputs():
    torch.manual_seed(0)
    return torch.randn(3, 5, 5, dtype=torch.float64).unbind()


def slow_means(returns, mask, size):
    """By loops: the mean return of the group's other rows at the action with the same number, or at their last one."""
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
def test_the_baseline_is_the_others_mean_return_at_the_same_action(size):
    returns, _, _ = random_inputs()
    gaps = torch.rand(5, 5, generator=torch.Generator().manual_seed(1)) < 0.6  # holes of an environment's tokens
    for mask in (MASK, MASK & gaps):
        expected = slow_means(returns, mask, size or 5)
        assert_close(mean_baselines(returns, mask, size)[mask], expected[mask])
        hidden = returns.masked_fill(~mask, float("nan"))
        assert_close(mean_baselines(hidden, mask, size), mean_baselines(returns, mask, size))


def test_groups_are_prompts_and_one_score_per_row_gives_rloo():
    returns, mask = random_inputs()[0][:4], MASK[[0, 1, 2, 4]]
    assert_close(mean_baselines(returns, mask, 2)[mask], slow_means(returns, mask, 2)[mask])
    scores = torch.tensor([1.0, 2.0, 4.0, 9.0])
    means = mean_baselines(scores[:, None].expand(4, 5), mask)
    assert_close(means, ((scores.sum() - scores) / 3)[:, None].expand(4, 5))
    returns[1] += 100  # a row's own returns are not in its baseline
    assert_close(mean_baselines(returns, mask)[1], mean_baselines(random_inputs()[0][:4], mask)[1])
    assert_close(mean_baselines(torch.zeros(1, 2), torch.zeros(1, 2)), torch.zeros(1, 2))


def cells(mask, size):
    """Yield the indices of the actions with the same number in a group."""
    starts = [[t for t in range(mask.size(1)) if row[t]] for row in mask]
    for first in range(0, len(mask), size):
        for number in range(mask.size(1)):
            yield [(i, starts[i][number]) for i in range(first, first + size) if len(starts[i]) > number]


@pytest.mark.parametrize("size", [6, 3, 2])
def test_the_weight_is_the_slope_of_a_regression_with_an_intercept(size):
    torch.manual_seed(0)
    returns, noise = torch.randn(2, 6, 5, dtype=torch.float64).unbind()
    values = 0.7 * noise + 0.5 * returns + 3
    mask = torch.rand(6, 5) < 0.8  # holes of an environment's tokens
    gains, signals = [], []
    for cell in cells(mask, size):
        if len(cell) > 1:
            mean = sum(returns[place] for place in cell) / len(cell)
            gains += [returns[place] - mean for place in cell]
            signals += [values[place] - mean for place in cell]
    lines = torch.stack([torch.stack(signals), torch.ones(len(signals), dtype=torch.float64)], dim=1)
    slope = torch.linalg.lstsq(lines, torch.stack(gains)[:, None]).solution[0].item()
    assert 0 < slope < 1
    products = critic_products(returns, values, mask, size)
    assert critic_weight(products) == pytest.approx(slope)
    hidden = (x.masked_fill(~mask, float("nan")) for x in (returns, values))
    assert_close(critic_products(*hidden, mask, size), products)
    order = torch.arange(6).view(-1, size).flip(0, 1).flatten()  # the order of groups and rows does not count
    assert_close(critic_products(returns[order], values[order], mask[order], size), products)


@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize(("answers", "size"), [(2, None), (3, None), (64, None), (64, 8), (64, 2), (5, 1)])
def test_a_random_critic_has_no_weight(answers, size, is_dense):
    torch.manual_seed(answers)
    mask = torch.arange(12) < torch.randint(1, 13, (answers, 1))
    scores = torch.randn(answers, 12) if is_dense else torch.randn(answers, 1)
    rewards = (100 + scores) * (mask if is_dense else mask & (mask.cumsum(1) == mask.sum(1, keepdim=True)))
    returns = rewards.flip(1).cumsum(1).flip(1)
    for value in (0.0, 7.0):
        products = critic_products(returns, torch.full_like(returns, value), mask, size)
        assert critic_weight(products) == pytest.approx(0, abs=1e-6)


def test_a_correct_critic_has_nearly_all_the_weight():
    torch.manual_seed(0)
    known, unknown = torch.randn(2, 40_000, 1, dtype=torch.float64).unbind()  # v = 1
    for size, left in ((2, 1.0), (8, 2.0), (8, 0.0)):
        products = critic_products(known + left * unknown, known, torch.ones(40_000, 1), size)
        assert critic_weight(products) == pytest.approx((size - 1) / (size - 1 + left**2), abs=0.02)
