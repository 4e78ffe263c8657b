import math

import pytest
import torch
from torch.testing import assert_close

from trl_ext.functional import KL_ESTIMATORS, adaptive_kl_coef, kl_estimate, learning_rate_factor, step_kl_sums


def test_kl_estimate_of_worked_example():
    logprobs = torch.tensor([[math.log(0.5), math.log(0.2), -1.0]])
    ref_logprobs = torch.tensor([[math.log(0.25), math.log(0.4), -1.0]])
    # d = log 2, -log 2, 0; exp(-d) = 1/2, 2, 1.
    log2 = math.log(2)
    expected = {
        "k1": [log2, -log2, 0.0],
        "k2": [log2**2 / 2, log2**2 / 2, 0.0],
        "k3": [log2 - 0.5, 1 - log2, 0.0],
    }
    assert expected.keys() == KL_ESTIMATORS.keys()
    for kind, numbers in expected.items():
        assert_close(kl_estimate(logprobs, ref_logprobs, kind), torch.tensor([numbers]))


def test_expectation_over_the_vocabulary_is_the_exact_kl():
    torch.manual_seed(0)
    logprobs = torch.randn(4, 11, dtype=torch.float64).log_softmax(dim=-1)
    ref_logprobs = torch.randn(4, 11, dtype=torch.float64).log_softmax(dim=-1)
    exact = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=logprobs), torch.distributions.Categorical(logits=ref_logprobs)
    )
    for kind in ("k1", "k3"):
        expectation = (logprobs.exp() * kl_estimate(logprobs, ref_logprobs, kind)).sum(dim=-1)
        assert_close(expectation, exact)


def test_k2_agrees_with_the_exact_kl_to_second_order():
    torch.manual_seed(0)
    logits, direction = torch.randn(2, 11, dtype=torch.float64)
    logprobs, ref_logprobs = logits.log_softmax(dim=-1), (logits + 1e-4 * direction).log_softmax(dim=-1)
    exact = (logprobs.exp() * (logprobs - ref_logprobs)).sum()
    assert_close((logprobs.exp() * kl_estimate(logprobs, ref_logprobs, "k2")).sum(), exact, rtol=1e-4, atol=0)


def test_k3_keeps_its_digits_near_zero():
    # d = 2^-10, exact in float32: d^2 / 2 - d^3 / 6 = 4.76682e-7, a fourth of which exp(-d) - 1 + d would round away.
    d = 2.0**-10
    estimate = kl_estimate(torch.tensor([[d]]), torch.tensor([[0.0]]), "k3")
    assert_close(estimate, torch.tensor([[math.expm1(-d) + d]]), rtol=1e-4, atol=0)


def test_adaptive_kl_coef_of_worked_examples(subtests):
    for kl, expected in [
        (6.0, 0.1),  # on target
        (6.6, 0.101),  # e = 0.1: 0.1 (1 + 0.1 * 1000 / 10000)
        (60.0, 0.102),  # e = 9, clipped to 0.2
        (5.4, 0.099),  # e = -0.1
        (-3.0, 0.098),  # e = -1.5, clipped to -0.2: a sampled k1 may be negative
    ]:
        with subtests.test(kl=kl):
            assert adaptive_kl_coef(0.1, kl, target=6.0, n_episodes=1000, horizon=10000) == pytest.approx(
                expected, rel=1e-12
            )


def test_adaptive_kl_coef_stays_between_its_bounds():
    assert adaptive_kl_coef(0.1, 60.0, 6.0, 1000, 10000, maximum=0.101) == 0.101
    assert adaptive_kl_coef(0.1, 0.0, 6.0, 1000, 10000, minimum=0.099) == 0.099
    # 1 - 0.2 * 10 = -1: never a negative coefficient.
    assert adaptive_kl_coef(0.1, 0.0, 6.0, 100000, 10000) == 0.0


def test_a_kl_that_is_not_finite_is_refused():
    for kl in (math.nan, math.inf):
        with pytest.raises(ValueError, match="kl must be finite"):
            adaptive_kl_coef(kl_coef=0.1, kl=kl, target=6.0, n_episodes=8, horizon=10000)


def test_step_kl_does_not_count_near_certain_tokens():
    bit = math.log(2)
    old, new = torch.tensor([[-1.0, -2.0, -9.0]]), torch.tensor([[-1.2, -1.6, 0.0]])
    entropies, actions = torch.tensor([[bit / 4, 3 * bit, 5.0]]), torch.tensor([[1, 1, 0]])
    sums = step_kl_sums(new, old, entropies, actions)
    assert_close(sums, torch.tensor([2 * (1 - math.exp(-0.1)) ** 2 + 2 * (1 - math.exp(0.2)) ** 2, 1.25]))
    padded = [torch.cat([each, torch.zeros(1, 7).to(each)], dim=1) for each in (new, old, entropies)]
    assert_close(step_kl_sums(*padded, torch.cat([actions, torch.ones(1, 7).to(actions)], dim=1)), sums)


def test_step_kl_of_a_small_step_and_of_a_large_one():
    ratios = torch.tensor([[0.99, 1.01, 1e-30, 1e30]], dtype=torch.float64)
    each = [step_kl_sums(log, torch.zeros(1), torch.zeros(1), torch.ones(1))[0] for log in ratios.log()[0].split(1)]
    assert_close(torch.stack(each), ratios.new_tensor([5e-5, 5e-5, 2.0, 2.0]), rtol=0.02, atol=0.0)


@pytest.mark.parametrize("steps", [1, 2, 4, 16, 128])
@pytest.mark.parametrize("rate", [1e-2, 1.0, 30.0])
@pytest.mark.parametrize("goes", ["one way", "at random"])
def test_the_learning_rate_factor_leads_to_the_target(steps, rate, goes):
    """Within a few rollouts, from any learning rate, whether the steps of a rollout or their squares add up."""
    factor, target = 0.1, 0.05
    for _ in range(6):
        used = []
        for taken in range(1, steps + 1):
            used.append(factor)
            sizes = [0.3 * rate * each for each in used]
            kl = sum(sizes) ** 2 / 2 if goes == "one way" else sum(size**2 for size in sizes) / 2
            if taken < steps or steps == 1:
                factor = learning_rate_factor(factor, sum(used) / len(used), kl, target, taken / steps)
    assert target / 3 < kl < target * 3
    assert [learning_rate_factor(0.7, 1.0, kl, target, 0.5) for kl in (0.0, math.nan)] == [0.7, 0.7]
