import math

import pytest
import torch

from trl_ext.functional import scatter, share_error, spent_level, student_quantile, unexplained_error


def test_levels_add_up_to_alpha():
    """Σ 1/k² = π²/6; the sum over k > n lies between 1/(n + 1) and 1/n."""
    spent = sum(spent_level(k, 0.05) for k in range(1, 1001))
    assert 1 - 0.7 / 1000 < spent / 0.05 < 1 - 0.5 / 1000
    assert spent_level(3, 0.05) == pytest.approx(spent_level(1, 0.05) / 9)


@pytest.mark.slow
def test_quantile_leaves_the_tail_to_its_right():
    """Student's density for 3 degrees of freedom is 2 / (π √3 (1 + t²/3)²); its tail is a sum of thin slices."""
    t = torch.linspace(student_quantile(0.01, 3), 1e4, 10_000_001, dtype=torch.float64)
    density = 2 / (math.pi * math.sqrt(3) * (1 + t**2 / 3) ** 2)
    assert torch.trapezoid(density, t).item() == pytest.approx(0.01, rel=1e-4)
    # for 1 the quantile is cot(π tail), and for infinitely many that of a normal variable
    assert student_quantile(1e-6, 1) == pytest.approx(1 / math.tan(math.pi * 1e-6))
    assert student_quantile(0.025, math.inf) == pytest.approx(1.959964, rel=1e-6)


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
