"""Define three other critics for the study: one of bins, the mean of two, and one fitted to the last rollout again."""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from trl_ext import PPOTrainer

# The bins' range holds all returns, which are in [0, 1]. Its middle is 0, the value that other critics start from
BINS, BOUND = 51, 1.25
SIGMA = 0.75  # of the target's Gaussian, in bins
REFITS, STEPS = 3, 16  # rollouts before which a critic is fitted to the last one again, and the steps of each fit


class Bins(nn.Module):
    """Predict a distribution over bins of the return; called, return its mean, (…, 1)."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, BINS)
        for parameter in self.linear.parameters():
            nn.init.zeros_(parameter)
        self.edges = torch.linspace(-BOUND, BOUND, BINS + 1)

    @property
    def weight(self) -> Tensor:
        return self.linear.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return (self.linear(hidden).softmax(-1) @ (self.edges[1:] + self.edges[:-1])[:, None]) / 2

    def target(self, returns: Tensor) -> Tensor:
        """Return each bin's share of a Gaussian around a return, (…, BINS): HL-Gauss, arXiv:2403.03950, section 3."""
        scale = SIGMA * 2 * BOUND / BINS * math.sqrt(2)
        below = torch.special.erf((self.edges - returns[..., None]) / scale)
        shares = below.diff(dim=-1)
        return shares / shares.sum(-1, keepdim=True)


class OtherCritic(PPOTrainer):
    """Train a critic with its own loss, whose values are not clipped, in worlds where all prompts have one length."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.change(self.accelerator.unwrap_model(self.model))

    def change(self, model: Any) -> None:
        """Change the critic of an actor-critic model, before there is an optimizer."""

    def losses(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return a loss for each token, (B, T)."""
        raise NotImplementedError

    def states(self, critic: Any, inputs: dict[str, Tensor]) -> Tensor:
        """Return the critic's hidden states before each token of the answers, (B, T, H)."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        return critic.base_model(input_ids=ids).last_hidden_state[:, inputs["prompt_ids"].size(1) - 1 : -1]

    def values(self, critic: Any, inputs: dict[str, Tensor]) -> Tensor:
        """Return a critic's value of each of these states, (B, T)."""
        return critic.score(self.states(critic, inputs))[..., 0]

    def _value_loss(self, values: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        loss, mask = self.losses(inputs), inputs["loss_mask"]
        self.metrics.critic_updated((loss, torch.zeros_like(loss, dtype=torch.bool)), mask)
        return self.args.vf_coef * (loss * mask).sum() / inputs["step_tokens"].clamp(min=1)


class HLGauss(OtherCritic):
    """Predict a distribution over bins of the return, by cross-entropy."""

    def change(self, model: Any) -> None:
        model.critic.score = Bins(model.critic.score.in_features)

    def losses(self, inputs: dict[str, Tensor]) -> Tensor:
        critic = self.model.critic
        logits = critic.score.linear(self.states(critic, inputs))
        return -(critic.score.target(inputs["returns"]) * logits.log_softmax(-1)).sum(-1)


class TwoCritics(OtherCritic):
    """Take the mean of two critics. Each has its own loss, and a head that starts from other weights."""

    def change(self, model: Any) -> None:
        model.critic.second = copy.deepcopy(model.critic)
        one_of_them = model.state_values
        for critic in (model.critic, model.critic.second):
            nn.init.normal_(critic.score.weight, std=0.02)

        def state_values(*args: Any, **kwargs: Any) -> Tensor:
            first, critic = one_of_them(*args, **kwargs), model.critic
            model.critic = critic.second
            try:
                return (first + one_of_them(*args, **kwargs)) / 2
            finally:
                model.critic = critic

        model.state_values = state_values

    def losses(self, inputs: dict[str, Tensor]) -> Tensor:
        both = (self.model.critic, self.model.critic.second)
        values = torch.stack([self.values(critic, inputs) for critic in both])
        return 0.5 * (values - inputs["returns"]).square().sum(0)


class FittedFirst(OtherCritic):
    """Fit the critic to the last rollout again, before it values each of the next three. Draw no more answers."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._last: dict[str, Tensor] = {}
        self._rollouts = 0

    def losses(self, inputs: dict[str, Tensor]) -> Tensor:
        return 0.5 * (self.values(self.model.critic, inputs) - inputs["returns"]).square()

    @torch.enable_grad()
    def _fit(self) -> None:
        critic, mask = self.model.critic, self._last["mask"]
        optimizer = torch.optim.AdamW(critic.parameters(), lr=self.args.learning_rate, eps=self.args.adam_epsilon)
        for _ in range(STEPS):
            ((self.losses(self._last) * mask).sum() / mask.sum()).backward()
            nn.utils.clip_grad_norm_(critic.parameters(), self.args.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()

    def advantages(self, rollout: Any, rewards: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        answers = {"prompt_ids": rollout.prompt_ids, "completion_ids": rollout.completion_ids, "mask": rollout.mask}
        if 0 < self._rollouts <= REFITS:
            self._fit()
            with torch.no_grad():
                values.copy_(self.values(self.model.critic, answers) * rollout.mask)
        self._rollouts += 1
        advantages, returns = super().advantages(rollout, rewards, values)
        self._last = answers | {"returns": returns}
        return advantages, returns
