"""The classes that PPOTrainer uses, without a trainer."""

from unittest.mock import Mock

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model

from tests.tiny import WORDS, tiny_config, tiny_gpt2, tiny_llama, tiny_reward_model, tiny_tokenizer
from trl_ext.models.loading import Loader
from trl_ext.ppo.controllers import KLController
from trl_ext.ppo.reward_calls import CheckedReward, DeferredErrors
from trl_ext.ppo.roles import Rewards, make_actor_critic
from trl_ext.rewards import RewardFailed


@pytest.fixture
def accelerator():
    return Accelerator(cpu=True)


def loader(policy, accelerator):
    return Loader(policy, None, {}, False, accelerator)


def no_rewards():
    return Rewards([], [], [], tiny_tokenizer())


# ---- The coefficient of the KL penalty ----


def test_the_adaptive_controller_follows_its_rule_and_restores_its_state(tmp_path):
    """β ← β · (1 + clip(KL / target − 1, ±0.2) · n / horizon), with 6 nats for 5 and 100 of 1,000 episodes."""
    args = tiny_config(
        tmp_path, kl_controller="adaptive", kl_coef=0.1, kl_target=5.0, kl_horizon=1000, kl_coef_max=0.11
    )
    controller = KLController(args)
    controller.update(6.0, 100)
    assert controller.kl_coef == pytest.approx(0.1 * 1.02)
    again = KLController(args)
    again.load_state_dict(controller.state_dict())
    again.scale(2.0)
    assert again.kl_coef == 0.11  # at its bound
    fixed = KLController(tiny_config(tmp_path, kl_coef=0.1))
    fixed.update(60.0, 100)
    assert fixed.kl_coef == 0.1


# ---- Roles ----


def test_a_critic_is_a_copy_of_a_fitting_reward_model_or_has_a_zero_head(accelerator):
    policy, tokenizer = tiny_llama(), tiny_tokenizer()
    reward, foreign = tiny_reward_model(policy), tiny_reward_model(tiny_gpt2(vocab_size=99))
    tokenizers = [tiny_tokenizer(words=["other"]), tiny_tokenizer(words=WORDS[::-1]), tokenizer]
    rewards = Rewards([foreign, tiny_reward_model(policy, seed=5), reward], tokenizers, ["a", "c", "b"], tokenizer)
    actor_critic, origin = make_actor_critic(loader(policy, accelerator), rewards, {}, None, None)
    assert origin == "a copy of reward model 'b'" and actor_critic.critic is not reward
    torch.testing.assert_close(actor_critic.critic.state_dict(), reward.state_dict(), rtol=0, atol=0)
    places = [{p.data_ptr() for p in model.parameters()} for model in (actor_critic.critic, reward)]
    assert places[0].isdisjoint(places[1])  # so training one does not change the other
    actor_critic, origin = make_actor_critic(loader(policy, accelerator), no_rewards(), {}, None, None)
    ids = torch.tensor([[6, 7, 8]])
    assert "zero head" in origin and not actor_critic.state_values(ids, torch.ones_like(ids)).any()


def test_a_language_model_as_critic_gets_a_head_of_zeros(accelerator, tmp_path):
    tiny_llama(seed=3).save_pretrained(tmp_path)
    actor_critic, origin = make_actor_critic(loader(tiny_llama(), accelerator), no_rewards(), {}, str(tmp_path), None)
    assert "zero head" in origin and not actor_critic.critic.score.weight.any()
    tiny_reward_model(tiny_llama()).save_pretrained(tmp_path)
    actor_critic, origin = make_actor_critic(loader(tiny_llama(), accelerator), no_rewards(), {}, str(tmp_path), None)
    assert "zero head" not in origin and actor_critic.critic.score.weight.any()


def test_with_an_adapter_the_critic_is_another_one_on_the_same_base(accelerator):
    def policy():
        config = LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj"])
        return get_peft_model(tiny_llama(), config)

    shared, _ = make_actor_critic(
        loader(policy(), accelerator), no_rewards(), {}, None, LoraConfig(r=2, target_modules=["v_proj"])
    )
    trained = [name for name, parameter in shared.named_parameters() if parameter.requires_grad]
    assert shared.shares_base and all("lora_" in name or name.startswith("critic.score") for name in trained)
    assert {".critic." in name for name in trained if "lora_" in name} == {True, False}
    value_model = tiny_reward_model(tiny_llama())
    apart, _ = make_actor_critic(loader(policy(), accelerator), no_rewards(), {}, value_model, None)
    assert apart.critic is value_model and not apart.shares_base


@pytest.mark.parametrize("is_bug", [False, True])
def test_errors_are_raised_together_and_a_failed_reward_has_its_own_class(is_bug):
    deferred = DeferredErrors()
    deferred.raise_everywhere(3)  # there are no errors
    errors = [RewardFailed("status 503"), *[KeyError("x")] * is_bug]
    for error in errors:
        CheckedReward(Mock(side_effect=error), "far", deferred)(prompts=[""], completion_ids=[[1]])
    with pytest.raises(RuntimeError, match="At step 3, process 0: reward function 'far': status 503") as raised:
        deferred.raise_everywhere(3)
    assert (type(raised.value) is RuntimeError) == is_bug and raised.value.__cause__ is errors[0]
    deferred.raise_everywhere(4)  # once


def test_a_reward_that_is_not_called_has_no_result_of_the_call_before():
    reward = CheckedReward(lambda completion_ids, **_: [[0.5] * len(ids) for ids in completion_ids], "f", Mock())
    reward(prompts=[""], completion_ids=[[1, 2]])
    assert reward.token_scores == [[0.5, 0.5]] and reward.failed == [False]
    reward.start(Mock())
    assert reward.token_scores == reward.failed == []
