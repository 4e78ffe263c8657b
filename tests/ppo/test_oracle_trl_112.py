"""
TRL 1.12's PPO formulas, written again, against real rollouts of PPOTrainer: full-length, in fp32, without EOS or pad
among the sampled tokens (both have a bias of -1e4 in the LM head), on one process, one micro-batch a minibatch.

There both trainers agree. Elsewhere 1.12 differs, as its `ppo_trainer.py` shows:

- A response that ends by EOS gets its score one position later, on the first pad token (`sequence_lengths_p1`), where
  the critic is asked for one more value; `padding_mask_p1` keeps that position in the value loss and in reward
  whitening. Here the score is on EOS and nothing follows it.
- A sampled pad token ends a response there (`first_true_indices(... == pad_token_id)`); here it is a token.
- Without `stop_token`, a response continues after EOS and 1.12 counts what follows; here EOS always ends it.
- `missing_eos_penalty` is subtracted from the score, as here; it has nothing that *sets* it (`missing_eos_score`).
- Whitening takes the moments of each process's rows; here those of all processes.
- A loss is the mean over micro-batches and processes of their means; here the sum over all tokens of the step, divided
  by their number.
- Old log-probs are those of the sampler (`output.scores`); here they are computed again if anything but float32 runs.
- `policy/approxkl_avg`, `policy/entropy_avg` and `val/ratio` average over padding too, then over micro-batches, and
  `val/ratio_var` is the variance of these means; here they are over real tokens.
- `objective/kl` sums the chosen `kl_estimator`; here always k1.
- Logits are divided by `temperature + 1e-7`; the learning rate is stepped once a rollout, here once an optimizer step.
"""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tests.tiny import collected, tiny_llama, tiny_ppo, tiny_reward_model
from trl_ext import PPOTrainer

LENGTH = 8
GAMMA, LAM, KL_COEF, CLIP, CLIP_VALUE, VF_COEF, TEMPERATURE = 0.93, 0.9, 0.3, 0.1, 0.05, 0.5, 0.8
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


class RecordingTrainer(PPOTrainer):
    """Keeps the models' outputs for each rollout and minibatch at that time, by forward passes of its own."""

    def _generate_and_score_completions(self, inputs):
        seen = collected(self)
        rollout = super()._generate_and_score_completions(inputs)
        with torch.no_grad():
            self.rollouts.append(
                {
                    **rollout,
                    "policy": logprobs(self.model.policy, rollout),
                    "reference": logprobs(self.ref_model, rollout),
                    "critic": values(self.model.critic, rollout),
                    "scores": seen[-1].rewards_per_func[:, 0],
                }
            )
        return rollout

    def _compute_loss(self, model, inputs):
        with torch.no_grad():
            now = {"policy": logprobs(self.model.policy, inputs), "critic": values(self.model.critic, inputs)}
        loss = super()._compute_loss(model, inputs)
        self.minibatches.append({**inputs, **now, "loss": loss.detach()})
        return loss


def padded(rows):
    """1.12's `forward`: pads become token 0, positions count the real tokens before them."""
    ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], 1)
    mask = torch.cat([rows["prompt_mask"], rows["completion_mask"]], 1)
    return {
        "input_ids": ids.masked_fill(mask == 0, 0),
        "attention_mask": mask,
        "position_ids": mask.cumsum(1) - mask,
    }


def logprobs(model, rows):
    logits = model(**padded(rows)).logits[:, -LENGTH - 1 : -1] / (TEMPERATURE + 1e-7)
    return logits.log_softmax(-1).gather(2, rows["completion_ids"].unsqueeze(2)).squeeze(2)


def values(critic, rows):
    return critic.score(critic.model(**padded(rows)).last_hidden_state)[:, -LENGTH - 1 : -1, 0]


def whitened(x, add_mean_back):
    standard = (x - x.mean()) * torch.rsqrt(x.var(correction=1) + 1e-8)
    return standard + x.mean() if add_mean_back else standard


def oracle_rollout(logprobs, ref_logprobs, values, scores, estimator, whiten_rewards):
    """Token rewards, whitened advantages and returns of full-length responses."""
    log_ratio = ref_logprobs - logprobs
    rewards = -KL_COEF * (-log_ratio if estimator == "k1" else log_ratio.exp() - 1 - log_ratio)
    rewards[:, -1] += scores
    if whiten_rewards:
        rewards = whitened(rewards, add_mean_back=True)
    advantages = torch.zeros_like(rewards)
    following_value, following_advantage = 0.0, 0.0
    for t in range(LENGTH - 1, -1, -1):
        delta = rewards[:, t] + GAMMA * following_value - values[:, t]
        advantages[:, t] = following_advantage = delta + GAMMA * LAM * following_advantage
        following_value = values[:, t]
    return rewards, whitened(advantages, add_mean_back=False), advantages + values


def oracle_losses(logprobs, old_logprobs, advantages, values, old_values, returns):
    ratio = (logprobs - old_logprobs).exp()
    policy = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
    near_values = torch.clamp(values, old_values - CLIP_VALUE, old_values + CLIP_VALUE)
    value = 0.5 * torch.maximum((values - returns) ** 2, (near_values - returns) ** 2).mean()
    return policy, value


def never_ending(model):
    """Bias the LM head so that pad (0) and EOS (2) are not sampled."""
    head = nn.Linear(model.lm_head.in_features, model.lm_head.out_features)
    head.weight.data.copy_(model.lm_head.weight.data)
    head.bias.data.zero_()
    head.bias.data[[0, 2]] = -1e4
    model.lm_head = head
    return model


@pytest.mark.parametrize(
    ("estimator", "whiten_rewards"),
    [
        ("k3", True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("k1", False), ("k1", True), ("k3", False))),
    ],
)
def test_rewards_advantages_returns_and_losses_equal_trl_112(tmp_path, token_rewards, estimator, whiten_rewards):
    policy = never_ending(tiny_llama(seed=0))
    trainer = tiny_ppo(
        tmp_path,
        policy,
        tiny_reward_model(policy, seed=3),
        RecordingTrainer,
        ref_model=never_ending(tiny_llama(seed=5, initializer_range=0.1)),
        value_model=tiny_reward_model(policy, seed=2),
        kl_coef=KL_COEF,
        kl_estimator=estimator,
        whiten_rewards=whiten_rewards,
        gamma=GAMMA,
        lam=LAM,
        baseline="critic",
        cliprange=CLIP,
        cliprange_value=CLIP_VALUE,
        vf_coef=VF_COEF,
        temperature=TEMPERATURE,
        learning_rate=1e-2,
        max_completion_length=LENGTH,
        max_steps=8,
    )
    trainer.rollouts, trainer.minibatches = [], []
    trainer.train()

    assert len(trainer.rollouts) == len(token_rewards) == 2
    for rollout, rewards in zip(trainer.rollouts, token_rewards, strict=True):
        assert rollout["completion_mask"].all() and rollout["completion_mask"].shape == (8, LENGTH)
        expected = oracle_rollout(
            *(rollout[name] for name in ("policy", "reference", "critic", "scores")), estimator, whiten_rewards
        )
        assert_close((rewards, rollout["advantages"], rollout["returns"]), expected, **TOLERANCE)

    logged = [entry for entry in trainer.state.log_history if "loss/policy_avg" in entry]
    assert len(trainer.minibatches) == len(logged) == 8
    for minibatch, log in zip(trainer.minibatches, logged, strict=True):
        names = ("policy", "old_logprobs", "advantages", "critic", "old_values", "returns")
        policy_loss, value_loss = oracle_losses(*(minibatch[name] for name in names))
        assert_close(torch.tensor(log["loss/policy_avg"]), policy_loss, **TOLERANCE)
        assert_close(torch.tensor(log["loss/value_avg"]), value_loss, **TOLERANCE)
        assert_close(minibatch["loss"], policy_loss + VF_COEF * value_loss, **TOLERANCE)
    # Both clips were active, so the comparison covers them
    assert logged[-1]["policy/clipfrac_avg"] > 0 and logged[-1]["val/clipfrac_avg"] > 0
