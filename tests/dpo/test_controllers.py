"""The parts that move β, and the tap, on numbers: no trainer is needed."""

from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from tests.dpo.worker import BETA_DPO, config
from trl_ext import DPOTrainer
from trl_ext.dpo.controllers import BetaController, MarginNormalizer, Pairs


def of(margins, sources=None):
    chosen = torch.tensor(margins)
    sources = torch.zeros(len(chosen), dtype=torch.long) if sources is None else torch.tensor(sources)
    return Pairs(chosen, torch.zeros_like(chosen), sources)


def test_log_ratios_are_of_the_answers_tokens_less_the_references():
    """With LD-DPO: of 3 and 1 tokens one counts in full, −1 − 0.5 · (2 + 4) + 2 and −3 + 1."""
    batch = {"completion_mask": torch.tensor([[0, 1, 1, 1], [0, 0, 1, 0]])}
    batch |= {"ref_chosen_logps": torch.tensor([-2.0]), "ref_rejected_logps": torch.tensor([-1.0])}
    log_probs = torch.tensor([[-8.0, -1.0, -2.0, -4.0], [-8.0, -1.0, -3.0, -9.0]])  # the first of a virtual token
    pairs = DPOTrainer._log_ratios(SimpleNamespace(ld_alpha=0.5), log_probs, batch, {"source": torch.tensor([1])})
    assert (pairs.chosen.item(), pairs.rejected.item(), pairs.sources.item()) == (-2.0, -2.0, 1)


def test_a_fixed_beta_stays(tmp_path):
    controller = BetaController(config(tmp_path), horizon=10)
    assert controller.draw(of([1.0])) is None and controller.observe(0.3, of([5.0])) == 0.3 == controller.step(0.3)


def test_drift_moves_beta_once_a_step_by_the_mean_over_its_pairs(tmp_path):
    controller = BetaController(config(tmp_path, beta_controller="drift", drift_target=1.0, beta_max=0.105), 10)
    assert controller.observe(0.1, of([2.0, 2.4])) == 0.1  # not within a step
    assert controller.observe(0.1, of([2.2])) == 0.1
    # drift = (1 + 1.2 + 1.1) / 3 = 1.1, so β · (1 + 0.1 · 3 / 10)
    assert controller.step(0.1) == pytest.approx(0.1 * 1.03)
    assert controller.step(0.1) == 0.1  # nothing was seen since
    controller.observe(0.1, of([100.0] * 9))
    assert controller.step(0.1) == 0.105  # bounded


def test_beta_dpo_sets_beta_from_the_kept_margins_and_remembers_all(tmp_path):
    controller = BetaController(config(tmp_path, beta_controller="beta_dpo"), 10)
    kept = torch.tensor([True, True, False])
    assert controller.observe(0.7, of([1.0, 2.0, 6.0]), kept) == pytest.approx(0.1 * (1 + 0.6 * 1.5))
    assert controller.margin_mean == pytest.approx(0.1 * 3)
    assert controller.margin_std == pytest.approx(0.9 + 0.1 * 7**0.5)  # of 1, 2 and 6
    assert controller.observe(0.7, of([1.0])) == pytest.approx(0.1 * (1 + 0.6 * (1 - 0.3)))
    assert controller.observe(0.7, of([-1e6])) == 1e-3  # bounded
    assert controller.step(0.7) == 0.7


def test_a_controller_that_is_loaded_draws_and_moves_as_the_saved_one_does(tmp_path):
    saved, loaded = (BetaController(config(tmp_path, **BETA_DPO), 10) for _ in range(2))
    batch = of([0.5, -1.0, 2.0, 0.1])
    saved.observe(0.1, batch, saved.draw(batch))
    loaded.load_state_dict(saved.state_dict())
    assert (loaded.margin_mean, loaded.margin_std) == (saved.margin_mean, saved.margin_std) != (0, 1)
    assert saved.draw(batch).sum() == 3
    loaded.draw(batch)
    assert [saved.draw(batch).tolist() for _ in range(9)] == [loaded.draw(batch).tolist() for _ in range(9)]
    assert saved.observe(0.1, batch) == loaded.observe(0.1, batch) != 0.1


def test_sources_are_brought_to_one_scale_after_a_step(tmp_path):
    normalizer = MarginNormalizer(["a", "b", "rare"], warmup_pairs=2)
    normalizer.observe(of([1.0, -1.0, 2.0], [0, 0, 1]))
    normalizer.observe(of([-2.0, 5.0], [1, 2]))
    sources = torch.tensor([0, 1, 2, -1])
    assert normalizer.factors_of(sources).tolist() == [1, 1, 1, 1]
    normalizer.step()
    # σ_b = 2 σ_a and as many pairs of each: factors 4/3 and 2/3, of mean 1
    expected = torch.tensor([4 / 3, 2 / 3, 1.0, 1.0])
    assert_close(normalizer.factors_of(sources), expected)
    other = MarginNormalizer(["b", "new", "a"], warmup_pairs=2)
    other.load_state_dict(normalizer.state_dict())
    assert_close(other.factors, expected[[1, 2, 0, 3]])
