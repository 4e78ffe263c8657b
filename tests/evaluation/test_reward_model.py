"""Measures of reward models: closed forms, worked examples, identities and invariances."""

import math

import pytest
import torch
from torch.testing import assert_close

from trl_ext.evaluation import (
    accuracy_by_length_gap,
    calibration_error,
    calibration_error_by_chance,
    fit_temperature,
    length_bias,
    ranking_report,
    reward_model_report,
)


def normal(*size, seed=1):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


def with_random_signs(margins, seed=0):
    """Margins with signs sampled from their own probabilities."""
    is_right = torch.rand(len(margins), generator=torch.Generator().manual_seed(seed)) < margins.abs().sigmoid()
    return torch.where(is_right, margins.abs(), -margins.abs())


# ---- Parts of the pairs ----


def test_accuracy_by_length_gap_shows_a_model_that_prefers_length():
    gaps = torch.arange(-50, 50)
    rows = accuracy_by_length_gap(gaps.float() + 0.5, gaps, bins=4)
    found = [(row["from"], row["to"], row["pairs"], row["accuracy"]) for row in rows]
    assert found == [(-50, -26, 25, 0), (-25, -1, 25, 0), (0, 24, 25, 1), (25, 49, 25, 1)]
    equal = accuracy_by_length_gap(torch.ones(100), torch.tensor([0] * 90 + [5] * 10))
    assert [(row["from"], row["to"], row["pairs"]) for row in equal] == [(0, 0, 90), (5, 5, 10)]


def test_length_bias_by_hand():
    # Right in 18 of 24 pairs whose chosen answer is longer, in 6 of 24 where it is shorter; equal lengths do not count
    right = torch.tensor([*[1] * 18, *[-1] * 6, *[1] * 6, *[-1] * 18, *[1] * 5], dtype=torch.double)
    gaps = torch.tensor([*[3] * 24, *[-2] * 24, *[0] * 5])
    found = length_bias(right, gaps, range(53))
    assert found["bias"] == pytest.approx(0.5) and found["longer"]["accuracy"] == 0.75
    # The pairs are independent, with a standard error of √(2 · 0.75 · 0.25 / 24) = 0.125
    assert found["interval"] == pytest.approx([0.5 - 1.96 * 0.125, 0.5 + 1.96 * 0.125], abs=0.04)
    one, turned = (length_bias(right[:48], sign * gaps[:48], [*range(24)] * 2) for sign in (1, -1))
    assert one["bias"] == -turned["bias"] and one["interval"] == pytest.approx([-x for x in turned["interval"]][::-1])


# ---- Calibration ----


def test_temperature_in_closed_form_and_its_identities():
    # All margins ±m, a share p of them right: the likelihood is largest where σ(m/T) = p
    for m, right in ((1.0, 7), (3.0, 9), (0.01, 6)):
        margins = torch.tensor([m] * right + [-m] * (10 - right))
        assert fit_temperature(margins) == pytest.approx(m / math.log(right / (10 - right)), rel=1e-6)
    margins = with_random_signs(2 * normal(20_000))
    assert fit_temperature(margins) == pytest.approx(1, abs=0.05)  # labels sampled from the model itself
    assert fit_temperature(5 * margins) == pytest.approx(5 * fit_temperature(margins), rel=1e-9)
    for none in ([1.0, 2.0], [-1.0, 0.5], [0.0, 0.0], [1.0, -1.0]):
        assert fit_temperature(torch.tensor(none)) is None


def test_calibration_error_of_worked_example():
    # Ten pairs at confidence 0.75, six of them right: gap 0.15. Five at 0.95, all right: gap 0.05.
    three, nineteen = math.log(0.75 / 0.25), math.log(0.95 / 0.05)
    margins = torch.tensor([three] * 6 + [-three] * 4 + [nineteen] * 5, dtype=torch.float64)
    assert_close(calibration_error(margins), torch.tensor((10 * 0.15 + 5 * 0.05) / 15, dtype=torch.float64))
    rows = normal(3, 40)
    assert_close(calibration_error(rows), torch.stack([calibration_error(row) for row in rows]))


def test_error_by_chance_is_that_of_sampled_labels():
    margins = 2 * normal(200)
    own = torch.stack([calibration_error(with_random_signs(margins, seed)) for seed in range(300)])
    expected = pytest.approx(own.mean().item(), abs=3 * own.std().item() / 300**0.5)
    assert calibration_error_by_chance(margins) == expected


def test_a_shift_of_all_scores_does_not_change_the_report():
    chosen, rejected = normal(2, 60)
    gaps = torch.randint(-9, 10, (60,), generator=torch.Generator().manual_seed(2))
    report, shifted = (reward_model_report(chosen + c, rejected + c, gaps) for c in (0.0, 3.0))
    for name in ("chosen_mean", "rejected_mean"):
        assert_close(shifted.pop(name), report.pop(name) + 3)
    assert shifted.pop("accuracy_by_length_gap") == report.pop("accuracy_by_length_gap")
    assert_close(shifted, report)
    low, high = report["accuracy_interval"]
    assert low < report["accuracy"] < high


# ---- Several answers per prompt ----


def test_rank_correlation_by_hand_and_with_ties_by_their_signs():
    # Scores order the answers 1, 3, 2, 4: Σd² = 2
    found = ranking_report([[4, 2, 3, 1]], [[1, 2, 3, 4]])
    assert found["spearman"] == pytest.approx(1 - 6 * 2 / (4 * 15))
    # With s_ij = sign(x_i − x_j), ρ is the correlation of their sums over j (Kendall, 1945)
    for scores, ranks in torch.randint(0, 4, (50, 2, 7), generator=torch.Generator().manual_seed(0)).double():
        a, b = ((x[:, None] - x).sign().sum(1) for x in (scores, -ranks))
        rho = ((a * b).sum() / ((a * a).sum() * (b * b).sum()).sqrt()).item()
        assert ranking_report([scores.tolist()], [ranks.tolist()])["spearman"] == pytest.approx(rho)
