"""The baseline in training: the critic, the leave-one-out mean, or the gated baseline."""

import pytest
import torch
from torch.testing import assert_close

from tests.tiny import collected, rows_of, tiny_ppo
from trl_ext.functional import critic_products, critic_weight, gae, mean_baselines


def logged(trainer, name):
    return [logs[name] for logs in trainer.state.log_history if name in logs]


def recorded(trainer):
    """The rollouts, each with the rows that are trained on."""
    seen, rows, advantages = collected(trainer), [], trainer.advantages

    def watch(rollout, rewards, values):
        result = advantages(rollout, rewards, values)
        rows.append((rewards, values, *result))
        return result

    trainer.advantages = watch
    trainer.train()
    return list(zip(seen, rows, strict=True))


PLAIN = {"normalize_advantages": False, "gamma": 0.97, "max_steps": 8, "learning_rate": 1e-2}


@pytest.mark.parametrize("generations", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_mean_is_subtracted_and_there_is_no_critic(tmp_path, generations):
    trainer = tiny_ppo(tmp_path, baseline="mean", num_generations=generations, **PLAIN)
    rollouts = recorded(trainer)
    assert len(rollouts) > 1
    for rollout, (rewards, values, advantages, _) in rollouts:
        mask = rollout.mask
        returns = gae(rewards, torch.zeros_like(values), mask, 0.97, 1.0)
        means = mean_baselines(returns, mask, None if generations == 1 else generations)
        assert_close(advantages, (returns - means) * mask)
    assert {"old_values", "returns"}.isdisjoint(rows_of(trainer))
    assert not logged(trainer, "val/explained_variance") and not logged(trainer, "loss/value_avg")
    assert trainer.model.critic is None and not (tmp_path / "critic").exists()


@pytest.mark.slow
def test_the_gate_weighs_the_critic_before_it_is_fitted(tmp_path):
    trainer = tiny_ppo(tmp_path, baseline="gated", lam=0.9, critic_learning_rate=3e-2, **PLAIN | {"max_steps": 16})
    torch.nn.init.normal_(trainer.model.critic.score.weight, generator=torch.Generator().manual_seed(3))
    products, weights = torch.zeros(2, dtype=torch.float64), []
    for rollout, (rewards, values, advantages, critics_target) in recorded(trainer):
        mask = rollout.mask
        returns = gae(rewards, torch.zeros_like(values), mask, 0.97, 1.0)
        means = mean_baselines(returns, mask)
        products = 0.9 * products + critic_products(returns, values, mask)
        weights.append(critic_weight(products))
        by_critic = gae(rewards, values, mask, 0.97, 0.9)
        assert_close(advantages, torch.lerp((returns - means) * mask, by_critic, weights[-1]))
        assert_close(critics_target * mask, (values + gae(rewards, values, mask, 0.97, 0.9)) * mask)
    assert logged(trainer, "val/baseline_weight") == pytest.approx(weights, rel=1e-4)
    assert 0 < min(weights[1:]) < max(weights[1:]) < 1


def test_a_random_gated_critic_leaves_no_constant_in_the_advantages(tmp_path):
    def reward(completions, **kwargs):
        return [100.0 + len(completion) % 3 for completion in completions]

    trainer = tiny_ppo(tmp_path, None, reward, baseline="gated", **PLAIN | {"max_steps": 1, "gamma": 1.0})
    torch.nn.init.zeros_(trainer.model.critic.score.weight)
    ((rollout, (*_, advantages, _)),) = recorded(trainer)
    assert logged(trainer, "val/baseline_weight") == [0.0]
    assert abs((advantages.sum() / rollout.mask.sum()).item()) < 1
