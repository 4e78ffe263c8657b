import math

import pytest
import torch
from torch.testing import assert_close

from trl_ext.evaluation import (
    accuracy_by_group,
    accuracy_interval,
    bootstrap_interval,
    calibration_error,
    calibration_error_by_chance,
    fit_temperature,
    reliability_bins,
    wilson_interval,
)


def drawn(margins, seed=0):
    """Margins whose signs are drawn from their own probabilities."""
    is_right = torch.rand(len(margins), generator=torch.Generator().manual_seed(seed)) < margins.abs().sigmoid()
    return torch.where(is_right, margins.abs(), -margins.abs())


def some_margins(n=20_000):
    return 2 * torch.randn(n, generator=torch.Generator().manual_seed(1), dtype=torch.double)


def test_temperature_in_closed_form_and_its_identities():
    # All margins ±m, a share p of them right: the likelihood is largest where σ(m/T) = p
    for m, right in ((1.0, 7), (3.0, 9), (0.01, 6)):
        margins = torch.tensor([m] * right + [-m] * (10 - right))
        assert fit_temperature(margins) == pytest.approx(m / math.log(right / (10 - right)), rel=1e-6)
    margins = drawn(some_margins())
    assert fit_temperature(margins) == pytest.approx(1, abs=0.05)  # labels of the model itself
    assert fit_temperature(5 * margins) == pytest.approx(5 * fit_temperature(margins), rel=1e-9)
    # Where the slope of the likelihood is 0, by a grid
    grid = torch.linspace(0.8, 1.2, 401, dtype=torch.double)
    likelihood = torch.nn.functional.logsigmoid(margins / grid[:, None]).sum(1)
    assert fit_temperature(margins) == pytest.approx(grid[likelihood.argmax()].item(), abs=1e-3)


@pytest.mark.parametrize("margins", [[1.0, 2.0], [-1.0, 0.5], [0.0, 0.0], [1.0, -1.0]])
def test_where_no_temperature_fits_there_is_none(margins):
    assert fit_temperature(torch.tensor(margins)) is None


def test_bins_hold_every_pair_and_add_up_to_the_calibration_error():
    margins = drawn(3 * some_margins(500))
    bins = reliability_bins(margins)
    assert sum(row["pairs"] for row in bins) == 500
    assert all(row["from"] <= row["confidence"] <= row["to"] for row in bins)
    error = sum(row["pairs"] / 500 * abs(row["accuracy"] - row["confidence"]) for row in bins)
    assert error == pytest.approx(calibration_error(margins).item())


def test_error_by_chance_is_what_drawn_labels_have():
    margins = some_margins(200)
    own = torch.stack([calibration_error(drawn(margins, seed)) for seed in range(300)])
    assert calibration_error_by_chance(margins) == pytest.approx(
        own.mean().item(), abs=3 * own.std().item() / 300**0.5
    )


def test_wilson_by_hand_and_where_the_share_is_1():
    # n = 4, p = 1/2, z = 1.96: (0.5 ± 1.96 √(1/16 + 1.96²/64)/1) around 1/2, over 1 + z²/4
    z = 1.959964
    half = z * math.sqrt(0.25 / 4 + z * z / 64) / (1 + z * z / 4)
    assert wilson_interval(0.5, 4) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-6)
    assert wilson_interval(1.0, 1)[0] == pytest.approx(1 / (1 + z * z), abs=1e-6) and wilson_interval(1.0, 1)[1] == 1


def test_pairs_of_one_prompt_count_as_one_observation():
    margins = torch.tensor([1.0, -1.0, 1.0, 1.0] * 50)
    alone = accuracy_interval(margins, list(range(200)))
    assert alone == pytest.approx(bootstrap_interval((margins > 0).double()))
    # Each pair four times over tells no more than once
    repeated = accuracy_interval(margins.repeat_interleave(4), [i for i in range(200) for _ in range(4)])
    assert repeated == pytest.approx(alone)
    assert accuracy_interval(margins[:4], list("abcd")) == wilson_interval(0.75, 4)


def test_groups_count_a_row_for_each_of_its_annotators():
    rows = accuracy_by_group(torch.tensor([1.0, -1.0, 0.0]), [["x", "y"], ["x", "x"], None])
    assert [(row["value"], row["pairs"], row["accuracy"]) for row in rows] == [
        ("x", 2, 0.5),
        ("None", 1, 0.5),
        ("y", 1, 1),
    ]


def test_large_sets_are_drawn_in_parts_with_the_same_result(monkeypatch):
    values = torch.randn(101, generator=torch.Generator().manual_seed(0))
    whole = bootstrap_interval(values)
    monkeypatch.setattr("trl_ext.evaluation.bootstrap._AT_ONCE", 1000)
    assert_close(bootstrap_interval(values), whole, rtol=0, atol=0)
