import math

import pytest
import torch

from trl_ext.functional import scatter, share_error, spent_level, student_quantile, unexplained_error


def test_levels_add_up_to_alpha():
    """Σ 1/k² = π²/6; the sum over k > n lies between 1/(n + 1) and 1/n."""
    spent = sum(spent_level(k, 0.05) for k in range(1, 1001))
    assert 1 - 0.7 / 1000 < spent / 0.05 < 1 - 0.5 / 1000
    assert spent_level(3, 0.05) == pytest.approx(spent_level(1, 0.05) / 9)


def test_quantile_is_students_at_least_and_no_more_than_a_percent_above():
    stats = pytest.importorskip("scipy.stats")
    for dof in (1.6, 2, 3.5, 5, 10, 30, 1000, math.inf):
        for tail in (0.05, 1e-2, 1e-3, 1e-5, 1e-8):
            exact = stats.norm.isf(tail) if math.isinf(dof) else stats.t.isf(tail, dof)
            assert 0.999 <= student_quantile(tail, dof) / exact <= 1.01, (tail, dof)
    assert stats.t.isf(1e-4, 1) < student_quantile(1e-4, 1.0) < 1.2 * stats.t.isf(1e-4, 1)


def test_scatter_is_the_variance_of_noise_and_leaves_a_drift_out():
    generator = torch.Generator().manual_seed(0)
    noise = 3 * torch.randn(20_000, generator=generator, dtype=torch.float64)
    for values in (noise, noise + torch.arange(20_000) / 100):
        variance, dof = scatter(values.diff().square().sum().item(), len(values))
        assert variance == pytest.approx(9, rel=0.05) and dof == pytest.approx(20_000 * 2 / 3, rel=0.01)
    assert scatter(2.0, 2) == (1.0, 1.0)  # of 0 and √2, as ½ (√2)²: one degree of freedom
    assert scatter(0.0, 1)[0] == math.inf


def test_degrees_of_freedom_of_scatter():
    """A variable with ν of them has a variance of 2/ν of its squared mean."""
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


def test_error_of_the_unexplained_share_is_no_smaller_than_that_of_independent_variances():
    generator = torch.Generator().manual_seed(0)
    residuals, returns = torch.randn(2, 20_000, 64, generator=generator, dtype=torch.float64)
    error = (residuals.var(1) / returns.var(1)).log().std().item()
    assert error == pytest.approx(unexplained_error(64), rel=0.05) and unexplained_error(1) == math.inf


def test_what_is_out_of_range_is_refused(subtests):
    for call in (
        lambda: spent_level(0, 0.05),
        lambda: spent_level(1, 1.0),
        lambda: student_quantile(0.5, 3.0),
        lambda: student_quantile(0.1, 0.0),
    ):
        with subtests.test(), pytest.raises(ValueError, match="got"):
            call()
