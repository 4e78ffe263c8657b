"""The hooks of `PPOTrainer` that a subclass overrides."""

import pytest
import torch
from torch.testing import assert_close

from tests.tiny import tiny_ppo
from trl_ext.ppo import PPOTrainer, Rollout


def trained(kind, tmp_path, **config):
    trainer = tiny_ppo(tmp_path, cls=kind, **config)
    trainer.train()
    return trainer


def weights_of(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


class Recorded(PPOTrainer):
    """Calls the default hooks, and keeps their arguments and results."""

    def token_rewards(self, rollout, scores, kl):
        rewards = super().token_rewards(rollout, scores, kl)
        assert isinstance(rollout, Rollout) and scores.shape == rollout.scores.shape
        assert_close(rewards.sum(1), scores - self.kl_controller.kl_coef * (kl * rollout.mask).sum(1))
        return rewards

    def advantages(self, rollout, rewards, values):
        assert torch.equal(values, rollout.values)
        return super().advantages(rollout, rewards, values)

    def rollout_metrics(self, rollout, rewards, advantages, returns):
        return {"mine/answers": float(len(rollout.scores)), "mine/rewards": rewards.sum().item()}


class Filled(PPOTrainer):
    """Trains on constants that depend on each row's first prompt token."""

    def token_rewards(self, rollout, scores, kl):
        return 2.0 * rollout.mask

    def advantages(self, rollout, rewards, values):
        assert torch.equal(rewards, 2.0 * rollout.mask)
        return rewards + rollout.prompt_ids[:, -1:], rewards - 7


def test_default_hooks_change_no_bit_and_their_metrics_are_logged(tmp_path):
    plain, recorded = trained(PPOTrainer, tmp_path / "a"), trained(Recorded, tmp_path / "b")
    assert torch.equal(weights_of(plain), weights_of(recorded))
    logs = [log for log in recorded.state.log_history if "mine/answers" in log]
    assert logs and all(log["mine/answers"] == 8 for log in logs)
    summed = [log["objective/rlhf_reward"] * 8 for log in logs]
    assert [log["mine/rewards"] for log in logs] == pytest.approx(summed, rel=1e-4)


def test_a_subclass_decides_what_is_trained_on(tmp_path):
    trainer = trained(Filled, tmp_path, max_steps=1)
    for rows in trainer._buffered_inputs:
        mask = rows["loss_mask"]
        assert_close(rows["advantages"] * mask, (2.0 + rows["prompt_ids"][:, -1:]) * mask, check_dtype=False)
        assert_close(rows["returns"] * mask, -5.0 * mask, check_dtype=False)
