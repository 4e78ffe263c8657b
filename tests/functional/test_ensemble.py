import pytest
import torch
from torch.testing import assert_close

from trl_ext.functional import disagreement, ensemble_score

NAN = torch.nan
# Members' scores of four rows: all say something; all alike; one is silent, so that nobody knows; all are
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
def test_scores_worked_by_hand(combine, expected):
    expected = torch.tensor(expected, dtype=torch.double)
    assert_close(ensemble_score(SCORES, combine, 0.5), expected, equal_nan=True)
    assert_close(disagreement(SCORES), STD, equal_nan=True)


@pytest.mark.parametrize("combine", ["mean", "median", "min", "uncertainty"])
def test_a_shift_and_a_scale_of_all_members_are_those_of_the_result(combine):
    """Of the paper's mean − λ · std² the scale would not be."""
    assert_close(
        ensemble_score(3 * SCORES + 7, combine, 0.5), 3 * ensemble_score(SCORES, combine, 0.5) + 7, equal_nan=True
    )
    assert_close(disagreement(3 * SCORES + 7), 3 * STD, equal_nan=True)


@pytest.mark.parametrize("combine", ["mean", "median", "min", "uncertainty"])
def test_members_that_agree_are_one_member(combine):
    row = torch.randn(5, dtype=torch.double)
    assert_close(ensemble_score(row.expand(4, 5), combine), row)
