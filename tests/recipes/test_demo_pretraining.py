"""What the study of pre-training counts, by hand."""

import pytest
import torch

from recipes.demo.pretraining import SHARES, WITHOUT, episodes_until, smoothed, table


def test_episodes_until_a_target_by_hand():
    scores = torch.tensor([0.0, 0.0, 3.0, 3.0, 3.0]).double()
    assert smoothed(scores).tolist() == [0, 1, 2, 3, 3]
    assert episodes_until(scores, 1.5, 100) == pytest.approx(150)
    assert episodes_until(scores, 0, 100) == 0
    assert episodes_until(scores, 3.5, 100) == float("inf")


def test_the_table_compares_within_a_world():
    rows = [
        {
            "seed": seed,
            "lam": 0.95,
            "run": run,
            "first_explained_variance": 0.1 * i,
            "held_out_explained_variance": 0.0,
            **{f"episodes_{share:g}": 1000.0 for share in SHARES},
            **{f"ratio_{share:g}": share for share in SHARES},
            "gold_end": seed + 0.25 * i,
        }
        for seed in (0, 1)
        for i, run in enumerate(WITHOUT)
    ]
    lines = table(rows).splitlines()
    assert len(lines) == 6
    assert "| +0.250 ± 0.000 | 2 |" in lines[3] and "| +0.500 ± 0.000 | +1000" in lines[3]
    assert "| 1 | " in lines[2] and "| 0 | 2 |" in lines[2]
