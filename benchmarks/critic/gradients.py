"""Measure how noisy the policy's gradient is over each baseline: how well a rollout's two halves agree on it."""

from typing import Any

import torch
from torch import Tensor

from trl_ext import PPOTrainer
from trl_ext.functional import (
    critic_products,
    critic_weight,
    gae,
    mean_baselines,
    moments,
    whiten,
)

EVERY = 2  # rollouts from one comparison to the next


def agreement(gradients: list[Tensor]) -> float:
    """Return the cosine of two gradients: 1 without noise, about 0 where there is nothing but noise."""
    first, second = gradients
    return torch.nn.functional.cosine_similarity(first, second, dim=0).item()


def advantages_over_each(rewards: Tensor, values: Tensor, mask: Tensor, lam: float) -> dict[str, Tensor]:
    """Return whitened (B, T) advantages over the critic, over the mean, and over both by this rollout's weight."""
    returns = gae(rewards, torch.zeros_like(values), mask, 1.0, 1.0)
    means = mean_baselines(returns, mask)
    weight = critic_weight(critic_products(returns, values, mask))
    compared = {"PPO": (values, lam), "gated": (torch.lerp(means, values, weight), lam), "mean": (means, 1.0)}
    advantages = {name: gae(rewards, baseline, mask, 1.0, each) for name, (baseline, each) in compared.items()}
    return {name: whiten(each, mask, moments(each, mask)) for name, each in advantages.items()}


class Compared(PPOTrainer):
    """Train as PPO does, and note at every second rollout how well the halves' gradients agree over each baseline."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.noted: list[dict[str, float]] = []
        self._rollouts = 0

    def advantages(self, rollout: Any, rewards: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self._rollouts += 1
        if self._rollouts % EVERY == 0:
            each = advantages_over_each(rewards, values, rollout.mask, self.args.lam)
            self.noted.append({name: agreement(self._halves(rollout, x)) for name, x in each.items()})
        return super().advantages(rollout, rewards, values)

    @torch.enable_grad()
    def _halves(self, rollout: Any, advantages: Tensor) -> list[Tensor]:
        """Return the policy's gradient of each half of the rollout; prompts must be of one length."""
        policy, found = self.model.policy, []
        for rows in torch.arange(len(advantages)).chunk(2):
            prompt, answer = rollout.prompt_ids[rows], rollout.completion_ids[rows]
            logits = policy(input_ids=torch.cat([prompt, answer], dim=1)).logits[:, prompt.size(1) - 1 : -1]
            logprobs = logits.log_softmax(-1).gather(2, answer[:, :, None])[:, :, 0]
            loss = (advantages[rows] * logprobs * rollout.mask[rows]).sum()
            found.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(policy.parameters()))]))
        return found
