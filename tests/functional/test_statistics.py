import math

import pytest
import torch
from torch.testing import assert_close

from trl_ext.functional import (
    disagreement,
    empty_moments,
    ensemble_score,
    explained_variance,
    merge_moments,
    moments,
    scatter,
    share_error,
    spent_level,
    standard_deviation,
    student_quantile,
    unexplained_error,
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


def test_a_large_mean_does_not_cancel_the_variance():
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
    # The mean 2.5 is that of other values: 3 - 2.5 = 0.5, and not 0.5 / sqrt(1e-8) = 5000.
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


NAN = torch.nan
# Members' scores of four rows: all differ; all are equal; one is missing, so there is no score; all are missing
SCORES = torch.tensor([[1.0, 2, NAN, NAN], [3, 2, 4, NAN], [8, 2, 6, NAN]], dtype=torch.double)
# mean 4, deviations −3 −1 4: std √(26/3)
STD = torch.tensor([(26 / 3) ** 0.5, 0, NAN, NAN], dtype=torch.double)


@pytest.mark.parametrize(
    "combine, expected",
    [
        ("mean", [4, 2, NAN, NAN]),
        ("median", [3, 2, NAN, NAN]),
        ("min", [1, 2, NAN, NAN]),
        ("uncertainty", [4 - 0.5 * (26 / 3) ** 0.5, 2, NAN, NAN]),
    ],
)
def test_ensemble_scores_by_hand(combine, expected):
    expected = torch.tensor(expected, dtype=torch.double)
    assert_close(ensemble_score(SCORES, combine, 0.5), expected, equal_nan=True)
    assert_close(disagreement(SCORES), STD, equal_nan=True)


@pytest.mark.parametrize("combine", ["mean", "median", "min", "uncertainty"])
def test_shift_and_scale_of_all_members_are_those_of_the_score(combine):
    """With the paper's mean − λ · std² the scale is not."""
    assert_close(
        ensemble_score(3 * SCORES + 7, combine, 0.5), 3 * ensemble_score(SCORES, combine, 0.5) + 7, equal_nan=True
    )
    assert_close(disagreement(3 * SCORES + 7), 3 * STD, equal_nan=True)


@pytest.mark.parametrize("combine", ["mean", "median", "min", "uncertainty"])
def test_members_that_agree_are_one_member(combine):
    row = torch.randn(5, dtype=torch.double)
    assert_close(ensemble_score(row.expand(4, 5), combine), row)


def test_levels_add_up_to_alpha():
    """Σ 1/k² = π²/6; the sum over k > n lies between 1/(n + 1) and 1/n."""
    spent = sum(spent_level(k, 0.05) for k in range(1, 1001))
    assert 1 - 0.7 / 1000 < spent / 0.05 < 1 - 0.5 / 1000
    assert spent_level(3, 0.05) == pytest.approx(spent_level(1, 0.05) / 9)


@pytest.mark.slow
def test_the_quantile_has_the_tail_to_its_right():
    """Student's density for 3 degrees of freedom is 2 / (π √3 (1 + t²/3)²); its tail is a sum of thin slices."""
    t = torch.linspace(student_quantile(0.01, 3), 1e4, 10_000_001, dtype=torch.float64)
    density = 2 / (math.pi * math.sqrt(3) * (1 + t**2 / 3) ** 2)
    assert torch.trapezoid(density, t).item() == pytest.approx(0.01, rel=1e-4)
    # for 1 the quantile is cot(π tail), and for infinitely many that of a normal variable
    assert student_quantile(1e-6, 1) == pytest.approx(1 / math.tan(math.pi * 1e-6))
    assert student_quantile(0.025, math.inf) == pytest.approx(1.959964, rel=1e-6)


def test_scatter_is_the_variance_of_the_noise_without_a_drift():
    generator = torch.Generator().manual_seed(0)
    noise = 3 * torch.randn(20_000, generator=generator, dtype=torch.float64)
    for values in (noise, noise + torch.arange(20_000) / 100):
        variance, dof = scatter(values.diff().square().sum().item(), len(values))
        assert variance == pytest.approx(9, rel=0.05) and dof == pytest.approx(20_000 * 2 / 3, rel=0.01)
    assert scatter(2.0, 2) == (1.0, 1.0)  # of 0 and √2, as ½ (√2)²: one degree of freedom
    assert scatter(0.0, 1)[0] == math.inf


def test_degrees_of_freedom_of_scatter():
    """A variable with ν degrees has a variance of 2/ν times its squared mean."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(100_000, 6, generator=generator, dtype=torch.float64)
    variances = noise.diff(dim=1).square().sum(1) / 10
    _, dof = scatter(1.0, 6)
    torch.testing.assert_close(
        2 / variances.var() * variances.mean() ** 2, torch.tensor(dof).double(), rtol=0.02, atol=0
    )


def test_share_error():
    # 8 of 8: q = 10/12, √(10/12 · 2/12 / 8) = 0.1318
    assert share_error(1.0, 8) == pytest.approx(0.1318, abs=1e-4) == share_error(0.0, 8)
    assert share_error(0.3, 1e8) == pytest.approx(math.sqrt(0.3 * 0.7 / 1e8), rel=1e-6)


def test_the_error_of_the_unexplained_share_is_not_too_small():
    generator = torch.Generator().manual_seed(0)
    residuals, returns = torch.randn(2, 20_000, 64, generator=generator, dtype=torch.float64)
    error = (residuals.var(1) / returns.var(1)).log().std().item()
    assert error == pytest.approx(unexplained_error(64), rel=0.05) and unexplained_error(1) == math.inf
