import math

import pytest
import torch
from torch.testing import assert_close

from trl_ext.evaluation import bootstrap_interval


def test_interval_of_a_mean_is_the_normal_one_for_many_rows():
    values = torch.randn(2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 7
    half = 1.96 * values.std().item() / math.sqrt(len(values))
    low, high = bootstrap_interval(values)
    # 4000 resamples place a 2.5 % quantile to about 3 % of the half-width
    assert_close(low, values.mean().item() - half, rtol=0, atol=0.1 * half)
    assert_close(high, values.mean().item() + half, rtol=0, atol=0.1 * half)


def test_interval_of_a_fair_coin_covers_the_truth_19_times_in_20():
    coins = torch.rand(200, 100, generator=torch.Generator().manual_seed(1)) < 0.5
    covered = [low <= 0.5 <= high for low, high in (bootstrap_interval(row.float(), resamples=500) for row in coins)]
    # 200 draws at 0.95 have standard deviation 0.015
    assert 0.95 - 3 * 0.015 <= sum(covered) / 200 <= 0.95 + 3 * 0.015


def test_equivariant_under_scale_and_shift_and_the_same_for_the_same_seed():
    values = torch.randn(50, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    state = torch.get_rng_state()
    low, high = bootstrap_interval(values, seed=3)
    assert bootstrap_interval(values, seed=3) == (low, high) != bootstrap_interval(values, seed=4)
    assert_close(bootstrap_interval(2 * values + 1, seed=3), (2 * low + 1, 2 * high + 1))
    assert_close(bootstrap_interval(-values, seed=3), (-high, -low))
    assert torch.equal(torch.get_rng_state(), state)


def test_rows_with_columns_are_drawn_together():
    values = torch.randn(30, 1, generator=torch.Generator().manual_seed(5)).repeat(1, 2)
    difference = bootstrap_interval(values, lambda rows: (rows[..., 0] - rows[..., 1]).mean(1))
    assert difference == (0.0, 0.0)


def test_refuses_what_has_no_mean(subtests):
    for values in [[], [1.0, math.nan], [1.0, math.inf]]:
        message = f"one or more values are needed, all finite; got {len(values)}, "
        with subtests.test(values=values), pytest.raises(ValueError, match=message):
            bootstrap_interval(torch.tensor(values))


def test_level_is_a_share(subtests):
    for level in [0.0, 1.0, 95]:
        message = f"level must lie within .0, 1., got {level}"
        with subtests.test(level=level), pytest.raises(ValueError, match=message):
            bootstrap_interval(torch.ones(3), level=level)
