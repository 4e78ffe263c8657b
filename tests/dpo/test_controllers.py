"""The controllers of β, without a trainer."""

import pytest
import torch
from torch.testing import assert_close

from tests.dpo.worker import config
from trl_ext.dpo.controllers import DriftController, MarginNormalizer, Pairs


def of(margins, sources=None):
    chosen = torch.tensor(margins)
    sources = torch.zeros(len(chosen), dtype=torch.long) if sources is None else torch.tensor(sources)
    return Pairs(chosen, torch.zeros_like(chosen), sources)


def test_drift_changes_beta_once_a_step_by_the_mean_over_its_pairs(tmp_path):
    controller = DriftController(config(tmp_path, beta_controller="drift", drift_target=1.0, beta_max=0.105), 10)
    controller.observe(of([100.0]))
    controller.restart()  # an interrupted step
    controller.observe(of([2.0, 2.4]))
    controller.observe(of([2.2]))
    # drift = (1 + 1.2 + 1.1) / 3 = 1.1, so β · (1 + 0.1 · 3 / 10)
    assert controller.step(0.1) == pytest.approx(0.1 * 1.03)
    controller.observe(of([2.0]))
    assert controller.step(0.1) == pytest.approx(0.1)  # on target: the last step's pairs do not count any more
    controller.observe(of([100.0] * 9))
    assert controller.step(0.1) == 0.105  # at its bound


def test_sources_get_one_scale_after_a_step(tmp_path):
    normalizer = MarginNormalizer(["a", "b", "rare"], warmup_pairs=2)
    normalizer.observe(of([1.0, -1.0, 2.0], [0, 0, 1]))
    normalizer.observe(of([-2.0, 5.0], [1, 2]))
    sources = torch.tensor([0, 1, 2, -1])
    assert normalizer.factors_of(sources).tolist() == [1, 1, 1, 1]
    normalizer.step()
    # σ_b = 2 σ_a and as many pairs of each: factors 4/3 and 2/3, with mean 1
    expected = torch.tensor([4 / 3, 2 / 3, 1.0, 1.0])
    assert_close(normalizer.factors_of(sources), expected)
    other = MarginNormalizer(["b", "new", "a"], warmup_pairs=2)
    other.load_state_dict(normalizer.state_dict())
    assert_close(other.factors, expected[[1, 2, 0, 3]])
