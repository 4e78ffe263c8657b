"""Reward models score without dropout during training; a critic does not start from a reward model of weight 0."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.tiny import tiny_gpt2, tiny_llama, tiny_tokenizer
from trl_ext import PPOTrainer
from trl_ext.models.actor_critic import ActorCritic, AdapterClassifier
from trl_ext.models.adapters import CRITIC, AdapterSwitch, add_critic
from trl_ext.models.loading import Loader
from trl_ext.ppo.reward_calls import AdapterReward
from trl_ext.ppo.roles import Rewards, add_critic_adapter

LORA = {"r": 2, "target_modules": ["c_attn"], "task_type": "CAUSAL_LM", "fan_in_fan_out": True}
DROPOUT = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}


def test_a_reward_model_on_the_policys_base_scores_without_dropout():
    policy = get_peft_model(tiny_gpt2(**DROPOUT), LoraConfig(**LORA))
    add_critic(policy, None)
    adapters = AdapterSwitch(policy)
    critic, reward = (AdapterClassifier(policy, adapters, CRITIC, nn.Linear(16, 1)) for _ in range(2))
    model = ActorCritic(policy, critic, adapters, {"reward_0": reward}).train()
    ids = torch.tensor([[6, 7, 8, 9]])

    def score():
        return PPOTrainer._score_on_base(SimpleNamespace(model=model), "reward_0", ids, torch.ones_like(ids))

    torch.testing.assert_close(score(), score(), rtol=0, atol=0)
    assert model.training and not torch.equal(*(reward(ids, torch.ones_like(ids)) for _ in range(2)))


@pytest.mark.parametrize(("weight", "start"), [(0.0, "with a zero head"), (1.0, "a copy of reward model 'judge'")])
def test_a_critic_does_not_start_from_a_reward_model_of_weight_0(weight, start):
    config = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    policy, tokenizer = get_peft_model(tiny_llama(), LoraConfig(**config)), tiny_tokenizer()
    policy.add_adapter("reward_0", LoraConfig(**config))
    rewards = Rewards([AdapterReward("judge")], [tokenizer], ["judge"], tokenizer, weights=[weight])
    loader = Loader(policy, None, {}, False, Accelerator(cpu=True))
    head, origin = add_critic_adapter(loader, rewards, {0: nn.Linear(16, 1)}, None, None)
    assert origin.endswith(start) and (head is None) == (weight == 0)
