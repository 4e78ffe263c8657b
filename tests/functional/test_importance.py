"""Importance weights by hand, and that they make a gradient right: exactly, over all answers of a small policy."""

import math

import pytest
import torch
from torch.testing import assert_close

from tests.functional.enumerated import MODES, World
from trl_ext.functional import effective_sample_size, importance_weights, merge_moments, moments

NAN, INF = math.nan, math.inf
# Ratios of tokens: 2, 4, 1/4 in the first row, 1/2, 1 in the second one; of the rows: 2, 1/2. NaN is under the mask.
LOGPROBS = torch.tensor([[0.8, 0.4, 0.1], [0.2, 0.5, NAN]]).log()
DRAWN = torch.tensor([[0.4, 0.1, 0.4], [0.4, 0.5, NAN]]).log()
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
    actual, is_outside = importance_weights(LOGPROBS, DRAWN, MASK, mode, *bounds)
    assert_close(actual, torch.tensor(weights))
    assert is_outside.int().tolist() == outside


def test_weights_are_finite_whatever_the_log_probs():
    """A token that the policy cannot draw weighs 0; sums of thousands of nats stay within a float."""
    logprobs = torch.tensor([[-INF, -1e4, 0.0, -1.0]], requires_grad=True)
    drawn, mask = torch.tensor([[-1.0, 0.0, -1e4, -INF]]), torch.tensor([[1, 1, 1, 0]])
    weights, _ = importance_weights(logprobs, drawn, mask, "token_truncate")
    assert_close(weights, torch.tensor([[0.0, 0.0, math.exp(20), 1.0]]))
    assert not weights.requires_grad
    long = torch.full((2, 4096), -1.0)
    ups, _ = importance_weights(long, 2 * long, torch.ones_like(long), "sequence_truncate")
    downs, _ = importance_weights(2 * long, long, torch.ones_like(long), "sequence_truncate")
    assert_close(ups, torch.full((2, 1), math.exp(20)))
    assert_close(downs, torch.zeros(2, 1))
    half, _ = importance_weights(LOGPROBS.bfloat16(), DRAWN.bfloat16(), MASK, "sequence_truncate")
    assert half.dtype == torch.float32


def test_a_log_prob_of_the_sampler_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="sampler_logprobs must be finite at real tokens, got nan"):
        importance_weights(LOGPROBS, DRAWN, torch.ones_like(MASK), "token_mask")


def test_effective_sample_size():
    # (1 + 3)² / (2 · (1 + 9)) = 0.8; equal weights, one of four, and none at all
    parts = torch.stack([moments(torch.tensor([[w]])) for w in (1.0, 3.0)])
    assert_close(effective_sample_size(merge_moments(parts)).item(), 0.8)
    for weights, expected in [([2.0] * 4, 1.0), ([5.0, 0.0, 0.0, 0.0], 0.25), ([0.0] * 4, 0.0)]:
        assert_close(effective_sample_size(moments(torch.tensor(weights))).item(), expected)


FULL_SUPPORT = ["noise 0.1", "noise 0.5", "temperature 0.7", "temperature 1.5"]


@pytest.mark.parametrize("sampler", FULL_SUPPORT)
def test_weights_of_answers_make_the_gradient_unbiased_and_bounds_give_bias_for_variance(sampler):
    world = World(longest=4)
    found = {name: world.estimate(sampler, mode) for name, mode in MODES.items()}
    assert found["none"].bias > 0.05
    assert found["sequence, no bound"].bias < 1e-12
    # Weights of tokens take some of the bias away, but not that of the tokens before and after
    assert 0.01 < found["token, no bound"].bias < found["none"].bias
    if sampler in ("noise 0.5", "temperature 0.7"):  # where a bound is reached
        truncated, whole = found["sequence_truncate, ≤ 2"], found["sequence, no bound"]
        assert 0.01 < truncated.bias < found["none"].bias and truncated.variance < whole.variance
        assert found["sequence_mask, 0.5 to 2"].variance < truncated.variance


@pytest.mark.parametrize("sampler", FULL_SUPPORT)
def test_weights_of_tokens_make_answers_of_one_token_unbiased(sampler):
    world = World(longest=1)
    assert world.estimate(sampler, MODES["none"]).bias > 0.01
    for level in ("token", "sequence"):
        assert world.estimate(sampler, MODES[f"{level}, no bound"]).bias < 1e-12


def test_no_weight_stands_for_what_a_truncated_sampler_never_draws():
    """Its bias is what the answers outside of the nucleus would have given: exactly that."""
    world = World(longest=4)
    found = {name: world.estimate("top-p 0.9", mode) for name, mode in MODES.items()}
    assert 0.05 < found["sequence, no bound"].bias < found["none"].bias
    probabilities = world.logprobs(world.logits).sum(1).exp()
    is_left_out = world.logprobs(world.sampler("top-p 0.9")).isinf().any(1)
    missing = (probabilities * is_left_out) @ world.gradients(torch.ones(len(world.ids), 1, dtype=torch.double))
    estimate = found["sequence, no bound"]
    assert_close(estimate.truth - estimate.mean, missing)
