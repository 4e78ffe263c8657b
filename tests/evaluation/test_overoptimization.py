import math

import pytest
import torch
from torch.testing import assert_close

from trl_ext.evaluation import fit_overoptimization, overoptimization_curve


def test_curve_of_worked_example():
    # d (α − β log d) at d = 0, 1, e, e² for α = 2, β = 1: 0, 2, e (2 − 1), e² (2 − 2)
    distance = torch.tensor([0.0, 1.0, math.e, math.e**2], dtype=torch.float64)
    assert_close(
        overoptimization_curve(distance, 2.0, 1.0), torch.tensor([0.0, 2.0, math.e, 0.0], dtype=torch.float64)
    )


def test_curve_peaks_where_the_docstring_says():
    alpha, beta = 1.7, 0.6
    peak = torch.tensor(math.exp(alpha / beta - 1), dtype=torch.float64, requires_grad=True)
    value = overoptimization_curve(peak, alpha, beta)
    (slope,) = torch.autograd.grad(value, peak)
    assert_close(slope, torch.zeros_like(slope))
    assert_close(value, beta * peak)


def test_fit_recovers_the_coefficients_of_the_curve():
    distance = torch.linspace(0, 6, 13, dtype=torch.float64)
    for alpha, beta in ((2.0, 0.9), (0.5, -0.3)):
        assert_close(fit_overoptimization(distance, overoptimization_curve(distance, alpha, beta)), (alpha, beta))


def test_fit_has_the_least_squared_error():
    generator = torch.Generator().manual_seed(0)
    distance = 4 * torch.rand(20, generator=generator, dtype=torch.float64)
    gain = torch.randn(20, generator=generator, dtype=torch.float64)
    alpha, beta = fit_overoptimization(distance, gain)

    def error(a, b):
        return (overoptimization_curve(distance, a, b) - gain).square().sum()

    for step in (1e-3, -1e-3):
        assert error(alpha + step, beta) > error(alpha, beta)
        assert error(alpha, beta + step) > error(alpha, beta)


def test_points_at_the_start_do_not_count():
    distance, gain = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([5.0, 1.0, 1.5])
    assert_close(fit_overoptimization(distance, gain), fit_overoptimization(distance[1:], gain[1:]))


def test_fit_refuses_what_has_no_answer(subtests):
    for distance, gain, message in [
        ([1.0, 2.0], [1.0], "must both be"),
        ([1.0, -2.0], [1.0, 1.0], "distance must be finite and >= 0"),
        ([1.0, 2.0], [1.0, math.nan], "gain finite"),
        ([0.0, 1.0, 1.0], [0.0, 1.0, 2.0], "two different distances"),
    ]:
        with subtests.test(message=message), pytest.raises(ValueError, match=message):
            fit_overoptimization(torch.tensor(distance), torch.tensor(gain))
