import math

import pytest
import torch
from torch.testing import assert_close

from trl_ext.evaluation import (
    accuracy_by_length_gap,
    calibration_error,
    length_bias,
    pairwise_accuracy,
    plot_margins,
    reward_model_report,
)
from trl_ext.rewards import centring_shift


def logit(probability):
    return math.log(probability / (1 - probability))


def test_accuracy_counts_a_tie_as_one_half():
    margins = torch.tensor([[1.0, -1.0, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    assert_close(pairwise_accuracy(margins), torch.tensor([2.5 / 4, 0.5], dtype=torch.float64))


def test_length_bias_by_hand():
    # Right in 18 of 24 pairs whose chosen answer is longer, in 6 of 24 where it is shorter; equal lengths say nothing
    right, gaps = [*[1] * 18, *[-1] * 6, *[1] * 6, *[-1] * 18, *[1] * 5], [*[3] * 24, *[-2] * 24, *[0] * 5]
    found = length_bias(torch.tensor(right, dtype=torch.double), torch.tensor(gaps), range(53))
    assert found["bias"] == pytest.approx(0.5) and found["longer"]["accuracy"] == 0.75
    # Of independent pairs, with a standard error of √(2 · 0.75 · 0.25 / 24) = 0.125
    assert found["interval"] == pytest.approx([0.5 - 1.96 * 0.125, 0.5 + 1.96 * 0.125], abs=0.04)
    one = length_bias(torch.tensor(right[:48], dtype=torch.double), torch.tensor(gaps[:48]), [*range(24)] * 2)
    turned = length_bias(torch.tensor(right[:48], dtype=torch.double), -torch.tensor(gaps[:48]), [*range(24)] * 2)
    assert one["bias"] == -turned["bias"] and one["interval"] == pytest.approx([-x for x in turned["interval"]][::-1])


def test_the_length_bias_of_few_prompts_is_not_known_however_many_pairs_they_have():
    gaps = torch.tensor([1, -1] * 500)
    few = length_bias(gaps.double(), gaps, [i // 2 % 19 for i in range(1000)])
    assert few["bias"] is None and few["longer"]["pairs"] == 500 and few["longer"]["prompts"] == 19
    assert length_bias(gaps.double(), gaps, [i // 2 % 20 for i in range(1000)])["bias"] == 1
    assert length_bias(gaps.double(), gaps.abs(), range(1000))["shorter"]["accuracy"] is None


def test_calibration_error_of_worked_example():
    # Ten pairs at confidence 0.75, six of them right: gap 0.15. Five at 0.95, all right: gap 0.05.
    margins = [logit(0.75)] * 6 + [-logit(0.75)] * 4 + [logit(0.95)] * 5
    expected = torch.tensor((10 * 0.15 + 5 * 0.05) / 15, dtype=torch.float64)
    assert_close(calibration_error(torch.tensor(margins, dtype=torch.float64)), expected)


def test_calibration_error_of_labels_drawn_from_the_model_is_near_zero():
    generator = torch.Generator().manual_seed(0)
    margins = 2 * torch.randn(100_000, generator=generator, dtype=torch.float64)
    drawn = torch.where(torch.rand(margins.shape, generator=generator, dtype=torch.float64) < margins.sigmoid(), 1, -1)
    assert calibration_error(margins * drawn) < 0.01
    # An overconfident model: three times the margin that the labels were drawn from
    assert calibration_error(3 * margins * drawn) > 0.1


def test_calibration_error_of_rows_is_that_of_each():
    margins = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    assert_close(calibration_error(margins), torch.stack([calibration_error(row) for row in margins]))


def test_accuracy_by_length_gap_shows_a_model_that_has_learnt_length():
    gaps = torch.arange(-50, 50)
    rows = accuracy_by_length_gap(gaps.float() + 0.5, gaps, bins=4)
    assert [(row["from"], row["to"], row["pairs"]) for row in rows] == [
        (-50, -26, 25),
        (-25, -1, 25),
        (0, 24, 25),
        (25, 49, 25),
    ]
    assert [row["accuracy"] for row in rows] == [0.0, 0.0, 1.0, 1.0]


def test_equal_gaps_share_a_bin_and_every_pair_is_in_one():
    gaps = torch.tensor([0] * 90 + [5] * 10)
    rows = accuracy_by_length_gap(torch.ones(100), gaps)
    assert sum(row["pairs"] for row in rows) == 100
    assert [(row["from"], row["to"]) for row in rows] == [(0, 0), (5, 5)]


def test_gaps_and_margins_must_match():
    with pytest.raises(ValueError, match="give one gap for each pair"):
        accuracy_by_length_gap(torch.ones(3), torch.ones(2))


def test_report_does_not_change_with_a_shift_of_all_scores():
    generator = torch.Generator().manual_seed(2)
    chosen, rejected = torch.randn(2, 60, generator=generator, dtype=torch.float64)
    gaps = torch.randint(-9, 10, (60,), generator=generator)
    report, shifted = (reward_model_report(chosen + c, rejected + c, gaps) for c in (0.0, 3.0))
    assert_close(shifted.pop("chosen_mean"), report.pop("chosen_mean") + 3)
    assert_close(shifted.pop("rejected_mean"), report.pop("rejected_mean") + 3)
    assert shifted.pop("accuracy_by_length_gap") == report.pop("accuracy_by_length_gap")
    assert_close(shifted, report)
    low, high = report["accuracy_interval"]
    assert low < report["accuracy"] < high


def test_plot_is_a_png(tmp_path):
    plot_margins(torch.randn(50), tmp_path / "margins.png")
    assert (tmp_path / "margins.png").read_bytes().startswith(b"\x89PNG")


def test_centring_is_exact_on_the_reference():
    generator = torch.Generator().manual_seed(3)
    everything = torch.randn(200, 8, generator=generator, dtype=torch.float64) + 1
    reference = everything[:50]
    head = torch.randn(8, generator=generator, dtype=torch.float64)
    centred = head - (reference @ head).mean() * centring_shift(reference, everything)
    assert_close((reference @ centred).mean(), torch.zeros((), dtype=torch.float64))


def test_centring_uses_a_constant_direction_where_there_is_one():
    # The last feature is 2 for every answer, so half of it is a bias, and margins do not change
    everything = torch.randn(200, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    everything[:, -1] = 2
    shift = centring_shift(everything[:20], everything, ridge=1e-12)
    assert_close(shift, torch.tensor([0, 0, 0, 0, 0.5], dtype=torch.float64), rtol=0, atol=1e-8)


def test_no_other_direction_that_centres_varies_less():
    generator = torch.Generator().manual_seed(5)
    everything = torch.randn(300, 6, generator=generator, dtype=torch.float64) @ torch.randn(
        6, 6, generator=generator, dtype=torch.float64
    )
    everything += torch.arange(6)
    mean = everything.mean(0)
    shift = centring_shift(everything, everything, ridge=0.0)
    for other in torch.randn(20, 6, generator=generator, dtype=torch.float64):
        neighbour = shift + 0.01 * (other - (other @ mean) * mean / (mean @ mean))  # also 1 on the mean
        assert_close(neighbour @ mean, torch.ones((), dtype=torch.float64))
        assert (everything @ neighbour).var() > (everything @ shift).var()


def test_centring_refuses_features_of_different_width():
    with pytest.raises(ValueError, match=r"got \(3, 4\) and \(3, 5\)"):
        centring_shift(torch.ones(3, 4), torch.ones(3, 5))


def test_centring_where_all_answers_are_the_same_one():
    shift = centring_shift(torch.full((3, 2), 2.0), torch.full((5, 2), 2.0))
    assert_close(shift @ torch.tensor([2.0, 2.0], dtype=torch.float64), torch.ones((), dtype=torch.float64))
