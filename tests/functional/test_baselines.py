"""The baseline of advantages: closed forms, and the same weight however the answers are cut into parts."""

import pytest
import torch
from torch.testing import assert_close

from trl_ext.functional import critic_weight, gae, mix_baselines, others_means, weight_sums

MASK = torch.arange(5) < torch.tensor([5, 3, 1, 0, 4]).unsqueeze(1)


def drawn():
    torch.manual_seed(0)
    return torch.randn(3, 5, 5, dtype=torch.float64).unbind()


def test_an_answer_takes_no_part_in_its_own_baseline():
    sums, counts = torch.tensor([6.0, 1.0, 9.0, 0.0]), torch.tensor([3.0, 1.0, 2.0, 0.0])
    # All others: (1 + 9 + 0) / (1 + 2 + 0), (6 + 9) / (3 + 2), (6 + 1) / (3 + 1), 16 / 6
    assert_close(others_means(sums, counts), torch.tensor([10 / 3, 3.0, 7 / 4, 16 / 6]))
    # In pairs: the partner's 1 / 1 and 6 / 3; the third's partner has nothing, so all others; 9 / 2
    assert_close(others_means(sums, counts, group_size=2), torch.tensor([1.0, 2.0, 7 / 4, 4.5]))
    assert_close(others_means(torch.ones(1), torch.ones(1)), torch.zeros(1))
    with pytest.raises(ValueError, match="group_size must divide the N = 4 answers, got 3"):
        others_means(sums, counts, group_size=3)


def test_the_weight_is_the_coefficient_of_least_squares():
    returns, values, _ = drawn()
    values = values + 0.5 * returns
    means = others_means((returns * MASK).sum(1), MASK.sum(1).double())
    gains, signals = ((x - means[:, None])[MASK] for x in (returns, values))
    slope = torch.linalg.lstsq(signals[:, None], gains[:, None]).solution.item()
    assert 0 < slope < 1
    assert critic_weight(weight_sums(returns, values, means, MASK)) == pytest.approx(slope)
    # Above a half exactly where the critic leaves less than the mean does
    explains = ((gains - signals).square().sum() < gains.square().sum()).item()
    assert (slope > 0.5) == explains


@pytest.mark.parametrize(
    ("values", "weight"),
    [
        ("the returns", 1.0),  # 2 · 2 + 2 · 2 over the same
        ("twice too timid", 1.0),  # the coefficient is 2
        ("twice too bold", 0.5),
        ("the opposite", 0.0),
        ("the mean", 0.0),
    ],
)
def test_the_weight_of_worked_critics(values, weight):
    returns, mask = torch.tensor([[3.0], [-1.0]]), torch.ones(2, 1)
    means = torch.tensor([1.0, 1.0])
    share = {"the returns": 1, "twice too timid": 0.5, "twice too bold": 2, "the opposite": -1, "the mean": 0}[values]
    assert critic_weight(weight_sums(returns, 1 + share * (returns - 1), means, mask)) == weight


def test_a_weight_of_one_is_gae_and_of_zero_the_return_minus_the_mean():
    rewards, values, _ = drawn()
    returns = gae(rewards, torch.zeros_like(values), MASK, 0.9, 1.0)
    means = torch.arange(5.0, dtype=torch.float64)
    advantages = gae(rewards, values, MASK, 0.9, 0.8)
    assert_close(mix_baselines(advantages, returns, means, MASK, 1.0), advantages)
    assert_close(mix_baselines(advantages, returns, means, MASK, 0.0), (returns - means[:, None]) * MASK)
    # With lambda 1 the mixture is the return minus the mixture of the baselines
    mixed = mix_baselines(gae(rewards, values, MASK, 0.9, 1.0), returns, means, MASK, 0.3)
    assert_close(mixed, (returns - 0.3 * values - 0.7 * means[:, None]) * MASK)


def test_sums_of_parts_are_those_of_the_whole_and_garbage_under_the_mask_is_not_read():
    returns, values, _ = drawn()
    means = torch.arange(5.0, dtype=torch.float64)
    whole = weight_sums(returns, values, means, MASK)
    parts = [weight_sums(returns[rows], values[rows], means[rows], MASK[rows]) for rows in ([0, 3], [1, 2, 4])]
    assert_close(sum(parts), whole)
    hidden = values.masked_fill(~MASK, float("nan"))
    assert_close(weight_sums(returns.masked_fill(~MASK, torch.inf), hidden, means, MASK), whole)
    assert_close(mix_baselines(hidden, hidden, means, MASK, 0.5), mix_baselines(values, values, means, MASK, 0.5))
