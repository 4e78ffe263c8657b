import torch
from torch.testing import assert_close

from trl_ext.functional import (
    empty_moments,
    explained_variance,
    merge_moments,
    moments,
    standard_deviation,
    variance,
    whiten,
)


def as_moments(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def test_moments_of_worked_example():
    values = torch.tensor([[1.0, 2.0, 99.0], [6.0, float("nan"), -99.0]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    # 1, 2, 6: mean 3, deviations -2, -1, 3, M2 = 4 + 1 + 9 = 14, variance 14 / 2 = 7 or 14 / 3.
    result = moments(values, mask)
    assert_close(result, as_moments(3, 3, 14, 1, 6))
    assert not result.requires_grad
    assert_close(variance(result), as_moments(7)[0])
    assert_close(variance(result, unbiased=False), as_moments(14 / 3)[0])
    assert_close(standard_deviation(result), as_moments(7**0.5)[0])
    assert_close(standard_deviation(result, unbiased=False), as_moments((14 / 3) ** 0.5)[0])
    assert_close(moments(torch.tensor([1.0, 2.0, 6.0])), result)


def test_moments_of_nothing_are_empty():
    for nothing in (moments(torch.ones(2, 3), torch.zeros(2, 3)), moments(torch.ones(0)), empty_moments()):
        assert_close(nothing, as_moments(0, 0, 0, torch.inf, -torch.inf))


def test_merged_shards_equal_the_whole_in_any_order():
    torch.manual_seed(0)
    values, mask = torch.randn(10, 7) * 3 + 5, torch.rand(10, 7) < 0.7
    shards = zip(values.split([1, 4, 2, 3]), mask.split([1, 4, 2, 3]), strict=True)
    parts = [*(moments(v, m) for v, m in shards), empty_moments()]
    whole = moments(values, mask)
    assert_close(merge_moments(torch.stack(parts)), whole)
    assert_close(merge_moments(torch.stack(parts[::-1])), whole)
    one_by_one = empty_moments()
    for part in parts:
        one_by_one = merge_moments(torch.stack([one_by_one, part]))
    assert_close(one_by_one, whole)


def test_large_mean_does_not_cancel_the_variance():
    torch.manual_seed(0)
    noise = torch.randn(1000, dtype=torch.float64) * 1e-3
    values = noise + 1e6
    # E[x^2] - E[x]^2 would lose all digits: 1e12 has a spacing of 1e-4, the variance is 1e-6.
    expected = noise.var()
    assert_close(variance(moments(values)), expected, rtol=1e-4, atol=0)
    merged = merge_moments(torch.stack([moments(part) for part in values.split(64)]))
    assert_close(variance(merged), expected, rtol=1e-4, atol=0)


def test_variance_of_fewer_than_two_values_is_zero_and_keeps_leading_dimensions():
    stacked = torch.stack([empty_moments(), moments(torch.tensor([3.0])), moments(torch.tensor([1.0, 3.0]))])
    assert_close(variance(stacked), as_moments(0, 0, 2))
    assert_close(variance(stacked, unbiased=False), as_moments(0, 0, 1))


def test_whitened_tokens_have_mean_zero_and_unit_unbiased_variance():
    torch.manual_seed(0)
    values, mask = torch.randn(4, 6) * 3 + 5, torch.rand(4, 6) < 0.7
    expected = (values - values[mask].mean()) / values[mask].std()
    whitened = whiten(values, mask, moments(values, mask))
    assert_close(whitened, torch.where(mask, expected, 0.0))
    mean_kept = whiten(values, mask.int(), moments(values, mask), shift_mean=False)
    assert_close(mean_kept, torch.where(mask, expected + values[mask].mean(), 0.0))
    # (1 - 2) / sqrt(2 + 2) = -0.5: eps is added to the variance.
    pair = torch.tensor([1.0, 3.0])
    assert_close(whiten(pair, torch.ones(2), moments(pair), eps=2.0), torch.tensor([-0.5, 0.5]))


def test_whiten_ignores_garbage_under_the_mask():
    torch.manual_seed(0)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]).bool()
    clean = torch.where(mask, torch.randn(2, 4), 0.0).requires_grad_()
    dirty = torch.where(mask, clean.detach(), float("nan")).requires_grad_()
    results = [whiten(values, mask, moments(values, mask)) for values in (clean, dirty)]
    for result in results:
        result.square().sum().backward()
    assert_close(results[1], results[0], rtol=0, atol=0)
    assert_close(dirty.grad, clean.grad, rtol=0, atol=0)


def test_whiten_of_shards_with_merged_moments_equals_the_whole():
    torch.manual_seed(0)
    values, mask = torch.randn(6, 5), torch.rand(6, 5) < 0.6
    shards = list(zip(values.split(2), mask.split(2), strict=True))
    merged = merge_moments(torch.stack([moments(v, m) for v, m in shards]))
    parts = [whiten(v, m, merged) for v, m in shards]
    assert_close(torch.cat(parts), whiten(values, mask, moments(values, mask)))


def test_whiten_does_not_scale_a_lone_value():
    values, mask = torch.tensor([[3.0, 8.0]]), torch.tensor([[1, 0]])
    # The mean is 2.5 from elsewhere: 3 - 2.5 = 0.5, and not 0.5 / sqrt(1e-8) = 5000.
    assert_close(whiten(values, mask, as_moments(1, 2.5, 0, 2.5, 2.5)), torch.tensor([[0.5, 0.0]]))
    assert_close(whiten(values, mask * 0, empty_moments()), torch.zeros(1, 2))


def test_explained_variance():
    torch.manual_seed(0)
    returns = torch.tensor([1.0, 2.0, 3.0, 6.0])
    # Values (1, 1, 3, 3): residuals (0, 1, 0, 3), M2 10 - 16 / 4 = 6; returns' M2 50 - 144 / 4 = 14; 1 - 6 / 14.
    residuals = returns - torch.tensor([1.0, 1.0, 3.0, 3.0])
    assert_close(explained_variance(moments(residuals), moments(returns)), as_moments(4 / 7)[0])
    assert_close(explained_variance(moments(returns - returns), moments(returns)), as_moments(1)[0])
    assert_close(explained_variance(moments(returns - 7), moments(returns)), as_moments(0)[0])
    assert explained_variance(moments(residuals), moments(torch.ones(4))).isnan()
