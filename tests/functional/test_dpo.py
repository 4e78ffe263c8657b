import math

import torch
from torch.nn.functional import logsigmoid
from torch.testing import assert_close

from trl_ext.functional import (
    displaced,
    margin_scales,
    preference_drift,
    preference_logits,
    preference_loss,
    sequence_logprobs,
)


def test_sequence_logprobs_of_worked_example():
    logprobs = torch.tensor([[-1.0, -2.0, -4.0], [-3.0, -5.0, -9.0]])
    mask = torch.tensor([[0, 1, 1], [1, 0, 0]])  # lengths 2 and 1, so the chosen -4 is beyond the common length
    assert_close(sequence_logprobs(logprobs, mask), torch.tensor([-6.0, -3.0]))
    assert_close(sequence_logprobs(logprobs, mask, ld_alpha=0.25), torch.tensor([-3.0, -3.0]))
    assert_close(sequence_logprobs(logprobs, mask, ld_alpha=0.0), torch.tensor([-2.0, -3.0]))


def test_logits_of_worked_examples():
    chosen, rejected = torch.tensor([1.0, -2.0]), torch.tensor([0.5, -3.0])
    # Δ = 0.5 and 1
    assert_close(preference_logits(chosen, rejected, 0.1), torch.tensor([0.05, 0.1]))
    assert_close(
        preference_logits(chosen, rejected, torch.tensor([0.1, 0.2]), torch.tensor([0.0, 0.3])),
        torch.tensor([0.05, -0.1]),
    )
    # DPOP with λ = 5: 1 − 5·2 = −9 where the chosen completion lost 2 nats
    assert_close(preference_logits(chosen, rejected, 0.1, dpop_lambda=5.0), torch.tensor([0.05, -0.9]))


def test_dpop_acts_only_on_chosen_completions_that_lost_likelihood():
    chosen = torch.tensor([1.0, -2.0], requires_grad=True)
    preference_logits(chosen, torch.zeros(2), 0.1, dpop_lambda=5.0).sum().backward()
    assert_close(chosen.grad, torch.tensor([0.1, 0.1 * (1 + 5)]))


def test_loss_is_log_2_at_beta_0_and_dpo_at_confidence_1():
    chosen, rejected = torch.randn(2, 5)
    assert_close(preference_loss(preference_logits(chosen, rejected, 0.0)), torch.full((5,), math.log(2)))
    logits = torch.linspace(-5, 5, 5)
    assert_close(preference_loss(logits, torch.ones(5)), -logsigmoid(logits))


def test_loss_is_a_cross_entropy_with_its_minimum_at_the_log_odds():
    confidence = torch.tensor([0.6, 0.75, 0.9], dtype=torch.double)
    logits = torch.randn(3, dtype=torch.double)
    expected = -confidence * torch.sigmoid(logits).log() - (1 - confidence) * (1 - torch.sigmoid(logits)).log()
    assert_close(preference_loss(logits, confidence), expected)
    best = torch.log(confidence / (1 - confidence)).requires_grad_()
    preference_loss(best, confidence).sum().backward()
    assert_close(best.grad, torch.zeros(3, dtype=torch.double))


def test_drift_and_displacement_of_worked_example():
    chosen, rejected = torch.tensor([1.0, -1.0, -2.0, 0.0]), torch.tensor([-3.0, -4.0, -1.0, -1.0])
    assert_close(preference_drift(chosen, rejected), torch.tensor([2.0, 2.5, 1.5, 0.5]))
    assert displaced(chosen, rejected).tolist() == [False, True, False, False]


def test_margin_scales_of_worked_example():
    # Unclamped: σ̄ is the harmonic mean, 1 / (½/1 + ½/3) = 1.5
    assert_close(margin_scales(torch.tensor([1.0, 3.0]), torch.tensor([5.0, 5.0])), torch.tensor([1.5, 0.5]))
    # f = c/1 and ¼ (from 100): 0.5·c + 0.5·¼ = 1 → c = 1.75
    assert_close(margin_scales(torch.tensor([1.0, 100.0]), torch.tensor([5.0, 5.0])), torch.tensor([1.75, 0.25]))


def test_margin_scales_keep_the_mean_at_1_between_their_bounds(subtests):
    for seed in range(20):
        with subtests.test(seed=seed):
            generator = torch.Generator().manual_seed(seed)
            stds = torch.exp(3 * torch.randn(5, generator=generator, dtype=torch.double))
            counts = torch.randint(1, 100, (5,), generator=generator).double()
            scales = margin_scales(stds, counts)
            assert_close((counts * scales).sum(), counts.sum())
            assert scales.min() >= 0.25 and scales.max() <= 4
            assert (scales.diff() * stds.diff() <= 0).all()  # the wider the spread, the smaller the scale
