import torch
from torch.testing import assert_close

from trl_ext.functional import (
    advantages_and_returns,
    choose_lam,
    gae,
    length_adaptive_lam,
    token_rewards,
)

LENGTHS = [5, 3, 1, 0, 4]
MASK = torch.arange(5) < torch.tensor(LENGTHS).unsqueeze(1)


def rollout():
    torch.manual_seed(0)
    return torch.randn(5, 5, dtype=torch.float64), torch.randn(5, 5, dtype=torch.float64)


def gae_by_the_sum(rewards, values, gamma, lam):
    """Equation 16 of arXiv:1506.02438 for one unpadded row: A_t = sum_l (gamma lam)^l delta_{t+l}."""
    values = [*values, 0.0]
    deltas = [reward + gamma * values[t + 1] - values[t] for t, reward in enumerate(rewards)]
    return [sum((gamma * lam) ** i * delta for i, delta in enumerate(deltas[t:])) for t in range(len(deltas))]


def test_token_rewards_of_worked_example():
    scores = torch.tensor([10.0, 20.0, float("nan"), 40.0])
    kl = torch.tensor([[1.0, 2.0, 3.0], [1.0, -2.0, 3.0], [1.0, 2.0, 3.0], [float("nan"), 2.0, float("inf")]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0], [0, 1, 0]])
    # -kl / 2, plus the score at the last real token: 10 - 1.5 = 8.5; 20 + 1 = 21; an empty row; 40 - 1 = 39.
    expected = torch.tensor([[-0.5, -1.0, 8.5], [-0.5, 21.0, 0.0], [0.0, 0.0, 0.0], [0.0, 39.0, 0.0]])
    for dtype in (torch.bool, torch.int64, torch.float32):
        assert_close(token_rewards(scores, kl, mask.to(dtype), kl_coef=0.5), expected)


def test_token_rewards_sum_to_the_score_minus_the_penalty():
    torch.manual_seed(0)
    scores, kl = torch.randn(5), torch.randn(5, 5)
    expected = torch.where(MASK.any(dim=1), scores, 0.0) - 0.3 * torch.where(MASK, kl, 0.0).sum(dim=1)
    assert_close(token_rewards(scores, kl, MASK, kl_coef=0.3).sum(dim=1), expected)


def test_token_scores_of_worked_example():
    """The last token gets a row's score minus the scores of its earlier tokens."""
    scores = torch.tensor([10.0, -1.0, 5.0, float("nan")])
    kl = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0], [2.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]])
    # The last real token's own score is not read, nor is what the mask hides
    given = torch.tensor([[1.0, 2.0, 99.0], [4.0, -7.0, float("nan")], [3.0, float("inf"), 0.0], [1.0, 1.0, 1.0]])
    # 1 - 0.5, 2 - 1, 10 - (1 + 2) - 1.5; 4, -1 - 4; 5 - 1; nothing
    expected = torch.tensor([[0.5, 1.0, 5.5], [4.0, -5.0, 0.0], [4.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    rewards = token_rewards(scores, kl, mask, 0.5, given)
    assert_close(rewards, expected)
    # gamma = lam = 1 and values of 0: the return at each token is the sum of the rewards from there on
    returns = gae(rewards, torch.zeros(4, 3), mask, gamma=1.0, lam=1.0)
    assert_close(returns, torch.tensor([[7.0, 6.5, 5.5], [-1.0, -5.0, 0.0], [4.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))


def test_gae_of_worked_example():
    rewards, values = torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[4.0, 6.0, 9.0]])
    # delta_1 = 2 + 0 - 6 = -4; delta_0 = 1 + 0.5 * 6 - 4 = 0; A_1 = -4; A_0 = 0 + 0.5 * 0.5 * -4 = -1.
    advantages = gae(rewards, values, torch.tensor([[1, 1, 0]]), gamma=0.5, lam=0.5)
    assert_close(advantages, torch.tensor([[-1.0, -4.0, 0.0]]))


def test_gae_equals_the_sum_of_the_paper(subtests):
    for gamma, lam in [(1.0, 0.95), (0.9, 0.8), (0.99, 1.0), (0.7, 0.0)]:
        with subtests.test(gamma=gamma, lam=lam):
            rewards, values = rollout()
            advantages = gae(rewards, values, MASK, gamma, lam)
            for row, length in enumerate(LENGTHS):
                expected = gae_by_the_sum(rewards[row, :length].tolist(), values[row, :length].tolist(), gamma, lam)
                expected = torch.tensor(expected + [0.0] * (5 - length), dtype=torch.float64)
                assert_close(advantages[row], expected)


def test_gae_ignores_garbage_under_the_mask(subtests):
    for garbage in [float("nan"), float("inf"), 1e9]:
        with subtests.test(garbage=garbage):
            rewards, values = rollout()
            clean = gae(rewards, values, MASK, gamma=0.99, lam=0.95)
            dirty_inputs = [torch.where(MASK, tensor, garbage).requires_grad_() for tensor in (rewards, values)]
            dirty = gae(*dirty_inputs, MASK.int(), gamma=0.99, lam=0.95)
            dirty.square().sum().backward()
            assert_close(dirty, clean, rtol=0, atol=0)
            for tensor in dirty_inputs:
                assert_close(tensor.grad[~MASK], torch.zeros(12, dtype=torch.float64))
                assert tensor.grad[MASK].isfinite().all()


def test_gae_skips_holes_in_the_mask():
    """The row without the holes has the same advantages at the same tokens."""
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(200, 9, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(200, 9, generator=generator) < torch.rand(200, 1, generator=generator)
    lam = torch.rand(200, generator=generator)
    advantages = gae(rewards, values, mask, gamma=0.9, lam=lam)
    for row in range(200):
        real = mask[row]
        alone = (x[row][real][None] for x in (rewards, values))
        expected = gae(*alone, torch.ones(1, int(real.sum())), gamma=0.9, lam=lam[row : row + 1])
        assert_close(advantages[row][real], expected[0], rtol=0, atol=1e-12)
    assert not advantages[~mask].any()


def test_length_adaptive_lam_of_worked_example():
    mask = torch.arange(8) < torch.tensor([[8], [4], [2], [1], [0]])
    # 1 - 1 / (0.5 * 8) = 0.75; 1 - 1 / 2 = 0.5; 1 - 1 / 1 = 0; 1 - 1 / 0.5 < 0, so 0; no token, so 0
    expected = torch.tensor([0.75, 0.5, 0.0, 0.0, 0.0])
    for dtype in (torch.bool, torch.int64, torch.float32):
        assert_close(length_adaptive_lam(mask.to(dtype), alpha=0.5), expected)


def test_weights_of_a_length_adaptive_lam_sum_to_alpha_times_the_length():
    for alpha, length in [(0.05, 100), (1.5, 7), (1.0, 3)]:
        lam = length_adaptive_lam(torch.ones(1, length), alpha).double()
        assert_close((lam ** torch.arange(5000)).sum().item(), alpha * length, rtol=1e-4, atol=0.0)


def test_gae_with_one_lam_per_row_is_gae_of_each_row():
    rewards, values = rollout()
    lam = torch.tensor([0.9, 0.0, 0.3, 0.5, 1.0], dtype=torch.float64)
    advantages = gae(rewards, values, MASK, 0.97, lam)
    for row in range(len(lam)):
        alone = [tensor[row : row + 1] for tensor in (rewards, values, MASK)]
        assert_close(advantages[row : row + 1], gae(*alone, 0.97, lam[row].item()), rtol=0, atol=0)
    assert_close(gae(rewards, values, MASK, 0.97, torch.full((5,), 0.4)), gae(rewards, values, MASK, 0.97, 0.4))


def test_a_length_adaptive_lam_is_one_per_row_and_does_not_change_the_returns():
    rewards, values = rollout()
    lam, lam_value = choose_lam(MASK, 0.9, None, 1.5)
    assert lam.shape == (5,) and ((lam >= 0) & (lam <= 1)).all() and lam_value == 1.0
    advantages, returns = advantages_and_returns(rewards, values, MASK, 0.9, lam, lam_value)
    assert_close(advantages, gae(rewards, values, MASK, 0.9, lam))
    assert_close(returns - values, gae(rewards, values, MASK, 0.9, 1.0))
    assert choose_lam(MASK, 0.9, None, None) == (0.9, None)  # the returns' λ is the same
    assert choose_lam(MASK, 0.9, 0.5, None) == (0.9, 0.5)
