"""Centring a reward model's head: the mean score is 0, and all else changes as little as possible."""

import torch
from torch.testing import assert_close

from trl_ext.dpo import centring_shift


def test_centring_is_exact_on_the_reference():
    generator = torch.Generator().manual_seed(3)
    everything = torch.randn(200, 8, generator=generator, dtype=torch.float64) + 1
    reference = everything[:50]
    head = torch.randn(8, generator=generator, dtype=torch.float64)
    centred = head - (reference @ head).mean() * centring_shift(reference, everything)
    assert_close((reference @ centred).mean(), torch.zeros((), dtype=torch.float64))


def test_centring_uses_a_constant_direction_where_there_is_one():
    # The last feature is 2 for every answer, so half of its weight acts as a bias, and margins do not change
    everything = torch.randn(200, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    everything[:, -1] = 2
    shift = centring_shift(everything[:20], everything, ridge=1e-12)
    assert_close(shift, torch.tensor([0, 0, 0, 0, 0.5], dtype=torch.float64), rtol=0, atol=1e-8)


def test_no_other_centring_direction_has_less_variance():
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


def test_centring_with_equal_answers():
    shift = centring_shift(torch.full((3, 2), 2.0), torch.full((5, 2), 2.0))
    assert_close(shift @ torch.tensor([2.0, 2.0], dtype=torch.float64), torch.ones((), dtype=torch.float64))
