import math

import pytest
import torch
from torch.testing import assert_close

from trl_ext.evaluation import accuracy_interval, bootstrap_interval, wilson_interval


def normal(*size, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_interval_of_a_mean_is_normal_for_many_rows():
    values = normal(2000) * 3 + 7
    half = 1.96 * values.std().item() / math.sqrt(len(values))
    # 4000 resamples give a 2.5 % quantile to about 3 % of the half-width
    expected = (values.mean().item() - half, values.mean().item() + half)
    assert_close(bootstrap_interval(values), expected, rtol=0, atol=0.1 * half)


def test_scale_shift_seed_and_resampling_in_parts(monkeypatch):
    values, state = normal(101, seed=2), torch.get_rng_state()
    low, high = bootstrap_interval(values, seed=3)
    assert bootstrap_interval(values, seed=3) == (low, high) != bootstrap_interval(values, seed=4)
    assert_close(bootstrap_interval(-2 * values + 1, seed=3), (1 - 2 * high, 1 - 2 * low))
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.setattr("trl_ext.evaluation.reward_model._AT_ONCE", 1000)
    assert bootstrap_interval(values, seed=3) == (low, high)


def test_wilson_interval_by_hand_and_at_1():
    # n = 4, p = 1/2, z = 1.96: (0.5 ± 1.96 √(1/16 + 1.96²/64)/1) around 1/2, over 1 + z²/4
    z = 1.959964
    half = z * math.sqrt(0.25 / 4 + z * z / 64) / (1 + z * z / 4)
    assert wilson_interval(0.5, 4) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-6)
    assert wilson_interval(1.0, 1) == pytest.approx((1 / (1 + z * z), 1), abs=1e-6)


def test_pairs_of_one_prompt_count_as_one_observation():
    margins = torch.tensor([1.0, -1.0, 1.0, 1.0] * 50)
    alone = accuracy_interval(margins, list(range(200)))
    assert alone == pytest.approx(bootstrap_interval((margins > 0).double()))
    # Each pair four times is as informative as once
    repeated = accuracy_interval(margins.repeat_interleave(4), [i for i in range(200) for _ in range(4)])
    assert repeated == pytest.approx(alone)
    assert accuracy_interval(margins[:4], list("abcd")) == wilson_interval(0.75, 4)
