"""Losses and importance weights by hand; with the weights the gradient of a small policy is unbiased."""

import math

import pytest
import torch
from torch.testing import assert_close

from tests.functional.enumerated import MODES, TabularPolicy
from trl_ext.functional import (
    effective_sample_size,
    importance_weights,
    masked_mean,
    masked_sum,
    merge_moments,
    moments,
    policy_loss,
    value_loss,
)


def test_policy_loss_of_worked_example():
    ratio = torch.tensor([[1.5, 1.5, 0.5, 0.5, 1.1, 0.95]])
    advantages = torch.tensor([[2.0, -2.0, 2.0, -2.0, -2.0, 3.0]])
    # Clipped to [0.9, 1.2]: the ratios are 1.2, 1.2, 0.9, 0.9, 1.1, 0.95.
    # -min(3, 2.4), -min(-3, -2.4), -min(1, 1.8), -min(-1, -1.8), 2.2, -2.85
    loss, clipped = policy_loss(ratio.log(), torch.zeros(1, 6), advantages, cliprange_low=0.1, cliprange_high=0.2)
    assert_close(loss, torch.tensor([[-2.4, 3.0, -1.0, 1.8, 2.2, -2.85]]))
    assert_close(clipped, torch.tensor([[True, False, False, True, False, False]]))


def test_dual_clip_bounds_the_loss_of_negative_advantages_only():
    ratio = torch.tensor([[5.0, 2.5, 0.1, 5.0]])
    advantages = torch.tensor([[-2.0, -2.0, -2.0, 2.0]])
    # Without: 10, 5, 0.8 * 2 = 1.6, -1.2 * 2 = -2.4; the bound 3 * 2 = 6 takes the first only.
    loss, clipped = policy_loss(ratio.log(), torch.zeros(1, 4), advantages, 0.2, 0.2, dual_clip=3.0)
    assert_close(loss, torch.tensor([[6.0, 5.0, 1.6, -2.4]]))
    assert_close(clipped, torch.tensor([[False, False, True, True]]))


def test_policy_loss_has_no_gradient_where_it_is_clipped():
    ratio = torch.tensor([[1.5, 1.5, 0.5, 0.5, 5.0]])
    advantages = torch.tensor([[2.0, -2.0, 2.0, -2.0, -2.0]])
    logprobs = ratio.log().requires_grad_()
    policy_loss(logprobs, torch.zeros(1, 5), advantages, 0.2, 0.2, dual_clip=3.0)[0].sum().backward()
    # d(-r A)/dlogp = -r A where neither clip holds.
    assert_close(logprobs.grad, torch.tensor([[0.0, 3.0, -1.0, 0.0, 0.0]]))


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_a_ratio_beyond_float32_leaves_loss_and_gradient_finite(dual_clip):
    """For instance that of a long turn, whose log-ratio is a sum."""
    logprobs = torch.tensor([[100.0, 100.0, -200.0]], requires_grad=True)
    loss, _ = policy_loss(logprobs, torch.zeros(1, 3), torch.tensor([[-1.0, 1.0, 1.0]]), 0.2, 0.2, dual_clip)
    loss.sum().backward()
    assert loss.isfinite().all() and not logprobs.grad.any()


def test_a_band_masks_ratios_outside_and_clips_none_inside():
    ratio = torch.tensor([[0.5, 0.75, 1.0, 5.0, 8.0, 0.5, 0.75, 8.0]])
    advantages = torch.tensor([[2.0, 2.0, 2.0, 2.0, 2.0, -2.0, -2.0, -2.0]])
    # Outside [0.7, 6] are 0.5 and 8, whatever the sign of the advantage; inside -r A, which is its own gradient
    expected = torch.tensor([[0.0, -1.5, -2.0, -10.0, 0.0, 0.0, 1.5, 0.0]])
    logprobs = ratio.log().requires_grad_()
    loss, outside = policy_loss(logprobs, torch.zeros(1, 8), advantages, 0.2, 0.2, band=[0.7, 6.0])
    loss.sum().backward()
    assert_close(loss.detach(), expected)
    assert_close(logprobs.grad, expected)
    assert_close(outside, torch.tensor([[True, False, False, False, True, True, False, True]]))


def test_a_band_includes_its_bounds_and_masks_ratios_that_overflow():
    logprobs = torch.tensor([[math.log(0.5), math.log(2.0), 200.0, -200.0, math.nan]]).requires_grad_()
    loss, outside = policy_loss(logprobs, torch.zeros(1, 5), torch.ones(1, 5), 0.2, 0.2, band=(0.5, 2.0))
    loss.sum().backward()
    assert outside.tolist() == [[False, False, True, True, True]]
    assert_close(logprobs.grad, torch.tensor([[-0.5, -2.0, 0.0, 0.0, 0.0]]))


def policy_loss_by_the_papers(logprob, old_logprob, advantage, low, high, dual_clip):
    ratio = math.exp(logprob - old_logprob)
    objective = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    return -max(objective, dual_clip * advantage) if advantage < 0 else -objective


def test_policy_loss_equals_the_papers_objective_elementwise():
    torch.manual_seed(0)
    logprobs, old_logprobs, advantages = torch.randn(3, 4, 8, dtype=torch.float64)
    expected = [
        policy_loss_by_the_papers(*numbers, low=0.1, high=0.3, dual_clip=2.0)
        for numbers in zip(*(t.flatten().tolist() for t in (logprobs, old_logprobs, advantages)), strict=True)
    ]
    loss, _ = policy_loss(logprobs, old_logprobs, advantages, 0.1, 0.3, dual_clip=2.0)
    assert_close(loss, torch.tensor(expected, dtype=torch.float64).view(4, 8))


def test_value_loss_of_worked_example():
    values = torch.tensor([[3.0, 3.0, 1.2, -1.0]])
    old_values = torch.ones(1, 4)
    returns = torch.tensor([[4.0, 1.0, 2.0, 2.0]])
    # Clipped to [0.5, 1.5]: 1.5, 1.5, 1.2, 0.5. Squared errors 1, 4, 0.64, 9 against 6.25, 0.25, 0.64, 2.25.
    loss, clipped = value_loss(values, old_values, returns, cliprange_value=0.5)
    assert_close(loss, torch.tensor([[3.125, 2.0, 0.32, 4.5]]))
    assert_close(clipped, torch.tensor([[True, False, False, False]]))
    loss, clipped = value_loss(values, old_values, returns)
    assert_close(loss, torch.tensor([[0.5, 2.0, 0.32, 4.5]]))
    assert_close(clipped, torch.zeros(1, 4, dtype=torch.bool))


def test_garbage_under_the_mask_changes_neither_mean_loss_nor_gradient(subtests):
    for garbage in [1e3, -7.0]:
        with subtests.test(garbage=garbage):
            torch.manual_seed(0)
            mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]]).bool()
            clean = torch.where(mask, torch.randn(4, 2, 4), 0.0)
            results = []
            for filler in (0.0, garbage):
                new, old, advantages, returns = torch.where(mask, clean, filler)
                new = new.requires_grad_()
                loss, policy_clipped = policy_loss(new, old, advantages, 0.2, 0.2)
                squared, value_clipped = value_loss(new, old, returns, 0.2)
                total = masked_mean(loss + squared, mask)
                total.backward()
                results.append((total, new.grad, masked_mean(policy_clipped, mask), masked_mean(value_clipped, mask)))
            assert_close(results[1], results[0], rtol=0, atol=0)
            assert_close(results[0][1][~mask], torch.zeros(4))


def test_gradients_of_micro_batches_add_up_to_that_of_the_batch():
    torch.manual_seed(0)
    mask = torch.arange(5) < torch.tensor([5, 1, 3, 2]).unsqueeze(1)
    new, old, advantages = torch.randn(3, 4, 5)
    gradients = []
    for sizes in ([4], [1, 3], [1, 1, 1, 1]):
        logprobs = new.clone().requires_grad_()
        for part in zip(*(t.split(sizes) for t in (logprobs, old, advantages, mask)), strict=True):
            (masked_sum(policy_loss(*part[:3], 0.2, 0.2)[0], part[3]) / mask.sum()).backward()
        gradients.append(logprobs.grad)
    assert_close(gradients[1], gradients[0])
    assert_close(gradients[2], gradients[0])


NAN, INF = math.nan, math.inf
# Ratios of tokens: 2, 4, 1/4 in the first row, 1/2, 1 in the second one; of the rows: 2, 1/2. NaN is under the mask.
LOGPROBS = torch.tensor([[0.8, 0.4, 0.1], [0.2, 0.5, NAN]]).log()
SAMPLER_LOGPROBS = torch.tensor([[0.4, 0.1, 0.4], [0.4, 0.5, NAN]]).log()
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


@pytest.mark.parametrize(
    ("mode", "bounds", "weights", "outside"),
    [
        ("token_truncate", (None, 3.0), [[2.0, 3.0, 0.25], [0.5, 1.0, 1.0]], [[0, 1, 0], [0, 0, 0]]),
        ("token_truncate", (0.4, 3.0), [[2.0, 3.0, 0.4], [0.5, 1.0, 1.0]], [[0, 1, 1], [0, 0, 0]]),
        ("token_mask", (0.4, 3.0), [[2.0, 0.0, 0.0], [0.5, 1.0, 1.0]], [[0, 1, 1], [0, 0, 0]]),
        ("token_mask", (0.4, None), [[2.0, 4.0, 0.0], [0.5, 1.0, 1.0]], [[0, 0, 1], [0, 0, 0]]),
        ("sequence_truncate", (None, 1.5), [[1.5], [0.5]], [[1], [0]]),
        ("sequence_mask", (0.6, 3.0), [[2.0], [0.0]], [[0], [1]]),
    ],
)
def test_weights_of_worked_examples(mode, bounds, weights, outside):
    actual, is_outside = importance_weights(LOGPROBS, SAMPLER_LOGPROBS, MASK, mode, *bounds)
    assert_close(actual, torch.tensor(weights))
    assert is_outside.int().tolist() == outside


def test_weights_are_finite_whatever_the_log_probs():
    """A token that the policy cannot sample has weight 0; sums of thousands of nats do not overflow."""
    logprobs = torch.tensor([[-INF, -1e4, 0.0, -1.0]], requires_grad=True)
    sampler_logprobs, mask = torch.tensor([[-1.0, 0.0, -1e4, -INF]]), torch.tensor([[1, 1, 1, 0]])
    weights, _ = importance_weights(logprobs, sampler_logprobs, mask, "token_truncate")
    assert_close(weights, torch.tensor([[0.0, 0.0, math.exp(20), 1.0]]))
    assert not weights.requires_grad
    long = torch.full((2, 4096), -1.0)
    ups, _ = importance_weights(long, 2 * long, torch.ones_like(long), "sequence_truncate")
    downs, _ = importance_weights(2 * long, long, torch.ones_like(long), "sequence_truncate")
    assert_close(ups, torch.full((2, 1), math.exp(20)))
    assert_close(downs, torch.zeros(2, 1))
    half, _ = importance_weights(LOGPROBS.bfloat16(), SAMPLER_LOGPROBS.bfloat16(), MASK, "sequence_truncate")
    assert half.dtype == torch.float32


def test_a_sampler_logprob_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="sampler_logprobs must be finite at real tokens, got nan"):
        importance_weights(LOGPROBS, SAMPLER_LOGPROBS, torch.ones_like(MASK), "token_mask")


def test_effective_sample_size():
    # (1 + 3)² / (2 · (1 + 9)) = 0.8; equal weights, one of four, and none at all
    parts = torch.stack([moments(torch.tensor([[w]])) for w in (1.0, 3.0)])
    assert_close(effective_sample_size(merge_moments(parts)).item(), 0.8)
    for weights, expected in [([2.0] * 4, 1.0), ([5.0, 0.0, 0.0, 0.0], 0.25), ([0.0] * 4, 0.0)]:
        assert_close(effective_sample_size(moments(torch.tensor(weights))).item(), expected)


FULL_SUPPORT = ["noise 0.1", "noise 0.5", "temperature 0.7", "temperature 1.5"]


@pytest.mark.parametrize("sampler", FULL_SUPPORT)
def test_sequence_weights_are_unbiased_and_bounds_trade_variance_for_bias(sampler):
    policy = TabularPolicy(longest=4)
    found = {name: policy.estimate(sampler, mode) for name, mode in MODES.items()}
    assert found["none"].bias > 0.05
    assert found["sequence, no bound"].bias < 1e-12
    # Token weights remove some of the bias, but not that of the tokens before and after
    assert 0.01 < found["token, no bound"].bias < found["none"].bias
    if sampler in ("noise 0.5", "temperature 0.7"):  # where a bound is active
        truncated, whole = found["sequence_truncate, ≤ 2"], found["sequence, no bound"]
        assert 0.01 < truncated.bias < found["none"].bias and truncated.variance < whole.variance
        assert found["sequence_mask, 0.5 to 2"].variance < truncated.variance


@pytest.mark.parametrize("sampler", FULL_SUPPORT)
def test_token_weights_are_unbiased_for_completions_of_one_token(sampler):
    policy = TabularPolicy(longest=1)
    assert policy.estimate(sampler, MODES["none"]).bias > 0.01
    for level in ("token", "sequence"):
        assert policy.estimate(sampler, MODES[f"{level}, no bound"]).bias < 1e-12


def test_the_bias_of_a_truncated_sampler_is_what_it_never_samples():
    """The bias is exactly the missing contribution of the completions outside of the nucleus."""
    policy = TabularPolicy(longest=4)
    found = {name: policy.estimate("top-p 0.9", mode) for name, mode in MODES.items()}
    assert 0.05 < found["sequence, no bound"].bias < found["none"].bias
    probabilities = policy.logprobs(policy.logits).sum(1).exp()
    is_left_out = policy.logprobs(policy.sampler("top-p 0.9")).isinf().any(1)
    missing = (probabilities * is_left_out) @ policy.gradients(torch.ones(len(policy.ids), 1, dtype=torch.double))
    estimate = found["sequence, no bound"]
    assert_close(estimate.truth - estimate.mean, missing)
