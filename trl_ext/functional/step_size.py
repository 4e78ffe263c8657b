"""Measure how far the steps on a rollout have moved the policy, and choose the learning rate of the next one."""

import math

import torch
from torch import Tensor

from .masking import check_shapes, masked_sum

BIT = math.log(2)  # nats
LARGEST_CHANGE = 10.0  # one step changes a learning rate by at most this factor


def step_kl_sums(logprobs: Tensor, old_logprobs: Tensor, entropies: Tensor, actions: Tensor) -> Tensor:
    """Sum the KL of the updates so far over tokens or turns, and count the policy's choices among them.

    The number of choices is Σ min(1, H / ln 2): an action with an entropy H of one bit or more is one choice, a
    certain action is none. So tokens without an alternative, such as those of a format, do not lower the mean
    Σ kl / Σ choices.

    With the ratio r of new to old probability, the kl of an action is min(2, 2 (1 − √r)²). Without the bound its mean
    is an unbiased estimate of 2 Σ (√p − √p_old)², four times the squared Hellinger distance, which for small steps is
    the KL. The bound keeps one rare action that has become likely from deciding the mean: r = 26 would be 34 nats.

    Args:
        logprobs: (B, T), nats, of the actions under the policy now.
        old_logprobs: (B, T), nats, of the actions under the policy that the rollout began with.
        entropies: (B, T), H, nats, of the actions under the policy now; of a turn the sum over its tokens.
        actions: (B, T), 1 = token at which an action, a token or a whole turn, starts.

    Returns:
        (2,): Σ kl in nats, and the number of choices.
    """
    check_shapes(logprobs=logprobs, old_logprobs=old_logprobs, entropies=entropies, actions=actions)
    return torch.stack(
        [
            masked_sum((2 * (1 - ((logprobs - old_logprobs) / 2).exp()).square()).clamp(max=2), actions),
            masked_sum((entropies / BIT).clamp(0, 1), actions),
        ]
    )


def step_kl(kls: Tensor, choices: Tensor, moved: Tensor) -> float:
    """Estimate the KL of a rollout's steps so far, from the minibatches of its last pass.

    The KL grows as the square of the sum of the steps' factors: with m_i, this sum before minibatch i, its summed KL
    is about kl · choices_i · (m_i / m_n)². Least squares over the minibatches fit kl, that before the last one, n:
    kl = Σ kl_i s_i / Σ choices_i s_i² with s_i = (m_i / m_n)².

    Args:
        kls: (N,), Σ kl of each minibatch, nats, by [`step_kl_sums`].
        choices: (N,), number of choices of each, by the same.
        moved: (N,), m, sum of the learning rate's factors of the steps before each; if the last is 0, all s_i are 1.

    Returns:
        The KL before the last minibatch, nats per choice.
    """
    shares = (moved / moved[-1]) ** 2 if moved[-1] else torch.ones_like(moved)
    return float((kls * shares).sum() / (choices * shares**2).sum().clamp(min=1e-6))


def learning_rate_factor(factor: float, mean: float, kl: float, target: float, share: float) -> float:
    """Return the factor of the learning rate that lets the updates of a rollout end at a KL of `target`.

    The KL grows as the square of the learning rate. After a share s of a rollout's steps, it is s² of the final KL if
    all steps go in one direction, and s of the final KL if they go in random directions. So with a mean factor f̄ so
    far, the factor that ends at the target lies between f̄ √(s² target / kl) and f̄ √(s target / kl). A `factor` outside
    these bounds is moved to the nearer one, by at most a factor of 10. If `kl` is 0 or NaN, `factor` is returned.

    Args:
        factor: present factor of the learning rate.
        mean: f̄, mean factor of this rollout's steps so far.
        kl: KL of these steps, nats per choice, from the sums of [`step_kl_sums`].
        target: KL at which the rollout's updates should end, nats per choice.
        share: s, share of the rollout's steps that are done, in (0, 1].
    """
    if not kl > 0:
        return factor
    low = mean * math.sqrt(share**2 * target / kl)
    high = mean * math.sqrt(share * target / kl)
    wanted = min(max(factor, low), high)
    return min(max(wanted, factor / LARGEST_CHANGE), factor * LARGEST_CHANGE)
