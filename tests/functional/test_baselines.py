"""The baseline of advantages: closed forms, and the same weight however the answers are cut into parts."""

import pytest
import torch
from torch.testing import assert_close

from trl_ext.functional import critic_products, critic_weight, gae, mean_baselines, mix_baselines, weight_sums

MASK = torch.arange(5) < torch.tensor([5, 3, 1, 0, 4]).unsqueeze(1)


def drawn():
    torch.manual_seed(0)
    return torch.randn(3, 5, 5, dtype=torch.float64).unbind()


def test_an_answer_is_compared_with_all_or_with_the_others_of_its_prompt():
    sums, counts = torch.tensor([6.0, 1.0, 9.0, 0.0]), torch.tensor([3.0, 1.0, 2.0, 0.0])
    assert_close(mean_baselines(sums, counts), torch.full((4,), 16 / 6))
    # In pairs: the partner's 1 / 1 and 6 / 3; the third's partner has nothing, so the mean of all; 9 / 2
    assert_close(mean_baselines(sums, counts, group_size=2), torch.tensor([1.0, 2.0, 16 / 6, 4.5]))
    assert_close(mean_baselines(torch.zeros(1), torch.zeros(1)), torch.zeros(1))
    with pytest.raises(ValueError, match="group_size must divide the N = 4 answers, got 3"):
        mean_baselines(sums, counts, group_size=3)


def test_the_weight_is_the_slope_of_a_regression_with_an_intercept():
    returns, values, _ = drawn()
    values, means = 0.7 * values + 0.5 * returns + 3, torch.arange(5.0, dtype=torch.float64)
    gains, signals = ((x - means[:, None])[MASK] for x in (returns, values))
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
    sums = weight_sums(returns, 7 + share * returns, torch.ones(2), mask)
    assert critic_weight(critic_products(sums)) == pytest.approx(weight)


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
