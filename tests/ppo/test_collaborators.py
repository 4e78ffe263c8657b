"""The objects that PPOTrainer hands over to, without a trainer."""

import copy
from unittest.mock import Mock

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model

from tests.ppo.test_rollout import NAN, a_rollout
from tests.tiny import WORDS, tiny_config, tiny_gpt2, tiny_llama, tiny_reward_model, tiny_tokenizer
from trl_ext.models.loading import Loader
from trl_ext.models.weights import check_tokenizer
from trl_ext.ppo.controllers import KLController
from trl_ext.ppo.metrics import PPOMetrics
from trl_ext.ppo.reward_normalizer import RewardNormalizer
from trl_ext.ppo.rewards import CheckedReward, Mistakes
from trl_ext.ppo.roles import Rewards, make_actor_critic, make_reference
from trl_ext.rewards import RewardFailed


@pytest.fixture
def accelerator():
    return Accelerator(cpu=True)


def loader(policy, accelerator):
    return Loader(policy, None, {}, False, accelerator)


def no_rewards():
    return Rewards([], [], [], tiny_tokenizer())


# ---- The coefficient of the KL penalty ----


def test_the_adaptive_controller_follows_its_rule_and_goes_on_from_its_state(tmp_path):
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
    assert again.kl_coef == 0.11  # bounded
    fixed = KLController(tiny_config(tmp_path, kl_coef=0.1))
    fixed.update(60.0, 100)
    assert fixed.kl_coef == 0.1


# ---- Scores ----


def test_running_moments_are_those_of_all_scores_so_far_and_are_restored():
    normalizer, first, second = (
        RewardNormalizer("running"),
        torch.tensor([1.0, 3.0, NAN]),
        torch.tensor([5.0, 7.0, 9.0]),
    )
    normalizer(first)
    again = RewardNormalizer("running")
    again.load_state_dict(normalizer.state_dict())
    everything = torch.tensor([1.0, 3.0, 5.0, 7.0, 9.0])
    expected = (second - everything.mean()) / everything.std()
    for one in (normalizer, again):
        scores, scales = one(second)
        torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(scales, (1 / everything.std()).expand(3), rtol=1e-5, atol=1e-6)


def test_moments_of_groups_and_the_demonstrations_mean_are_restored():
    groups, first = ["a", "b", "a", "b"], torch.tensor([1.0, 2.0, 3.0, 5.0])
    second = torch.tensor([4.0, 0.0, 8.0, 1.0])
    by_group, to_reference = RewardNormalizer("group"), RewardNormalizer("reference")
    by_group(first, groups)
    to_reference.reference_mean = 2.0
    for normalizer, given in ((by_group, (second, groups)), (to_reference, (second,))):
        again = RewardNormalizer(normalizer.kind)
        again.load_state_dict(copy.deepcopy(normalizer.state_dict()))
        torch.testing.assert_close(again(*given), normalizer(*given), rtol=0, atol=0)


# ---- Metrics ----


def test_metrics_of_a_rollout(accelerator):
    """Of two rows one has a score: only it counts, but for the lengths; k1 of its tokens is 0.5, 0 and −1."""
    metrics, rollout = PPOMetrics(accelerator, ["judge"]), a_rollout()
    values = torch.zeros(2, 3)
    metrics.collected(rollout, rollout.scores, rollout.kl("k1"), values, values, values, kl_coef=0.1)
    report = metrics.report()
    assert report["objective/kl"] == pytest.approx(-0.5)
    assert report["objective/kl_per_token"] == pytest.approx(-0.5 / 3)
    assert report["objective/scores"] == report["rewards/judge/mean"] == 1.0
    assert report["objective/entropy"] == pytest.approx(6.0)
    assert report["objective/non_score_reward"] == pytest.approx(0.05)
    assert report["objective/num_unscored"] == 1 and report["completions/mean_length"] == 2.5
    assert report["episode"] == 2 and "objective/kl" not in metrics.report()  # it starts anew


def test_metrics_of_an_evaluation_count_real_rows_only(accelerator):
    metrics, rollout = PPOMetrics(accelerator, ["judge"]), a_rollout(scores=torch.tensor([1.0, 5.0]))
    metrics.evaluated(rollout, torch.tensor([True, False]), "greedy/")
    report = metrics.report_evaluation()
    assert report["greedy/objective/scores"] == 1.0 and report["greedy/completions/mean_length"] == 3.0


def test_metrics_go_on_from_their_state(accelerator):
    first, second = PPOMetrics(accelerator, []), PPOMetrics(accelerator, [])
    first.gradient("policy", torch.tensor(3.0))
    first.episodes = 8
    second.load_state_dict(first.state_dict())
    second.gradient("policy", torch.tensor(5.0))
    report = second.report()
    assert report["grad_norm/policy"] == 4.0 and report["episode"] == 8


# ---- Who is who ----


def test_a_critic_is_a_copy_of_the_reward_model_that_fits_or_has_a_zero_head(accelerator):
    policy, tokenizer = tiny_llama(), tiny_tokenizer()
    reward, foreign = tiny_reward_model(policy), tiny_reward_model(tiny_gpt2(vocab_size=99))
    tokenizers = [tiny_tokenizer(words=["other"]), tiny_tokenizer(words=WORDS[::-1]), tokenizer]
    rewards = Rewards([foreign, tiny_reward_model(policy, seed=5), reward], tokenizers, ["a", "c", "b"], tokenizer)
    actor_critic, origin = make_actor_critic(loader(policy, accelerator), rewards, {}, None, None)
    assert origin == "a copy of reward model 'b'" and actor_critic.critic is not reward
    torch.testing.assert_close(actor_critic.value_model.state_dict(), reward.state_dict(), rtol=0, atol=0)
    actor_critic, origin = make_actor_critic(loader(policy, accelerator), no_rewards(), {}, None, None)
    ids = torch.tensor([[6, 7, 8]])
    assert "zero head" in origin and not actor_critic.state_values(ids, torch.ones_like(ids)).any()


def test_a_reward_model_is_known_by_its_weights_and_its_tokenizer():
    def identity(seed, words):
        model = tiny_reward_model(tiny_llama(), seed=seed)
        return Rewards([model], [tiny_tokenizer(words)], ["r"], tiny_tokenizer()).identities()["reward r"]

    words = "the a cat".split()
    assert identity(1, words) == identity(1, words)
    assert len({identity(1, words), identity(2, words), identity(1, words[::-1])}) == 3


def test_with_an_adapter_the_critic_is_another_one_on_the_same_base_unless_it_is_given(accelerator):
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


def test_a_reference_is_a_frozen_copy_of_the_policy_as_it_is(tmp_path):
    policy, args = tiny_llama(), tiny_config(tmp_path)
    accelerator = Accelerator(cpu=True)  # a config resets the state of one before it
    reference = make_reference(loader(policy, accelerator), None, args, tiny_tokenizer())
    torch.testing.assert_close(reference.state_dict(), policy.state_dict(), rtol=0, atol=0)
    assert reference is not policy and not any(p.requires_grad for p in reference.parameters())


def test_only_the_pad_token_may_be_out_of_the_vocabulary():
    tokenizer = tiny_tokenizer(pad=False)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    check_tokenizer(tiny_llama(), tokenizer)
    tokenizer.add_tokens(["<tool>"])
    with pytest.raises(ValueError, match="<tool>"):
        check_tokenizer(tiny_llama(), tokenizer)


@pytest.mark.parametrize("is_bug", [False, True])
def test_mistakes_are_raised_together_and_a_failed_reward_is_told_from_a_bug(is_bug):
    mistakes = Mistakes()
    mistakes.raise_everywhere(3)  # there are none
    errors = [RewardFailed("status 503"), *[KeyError("x")] * is_bug]
    for error in errors:
        CheckedReward(Mock(side_effect=error), "far", mistakes)(prompts=[""], completion_ids=[[1]])
    with pytest.raises(RuntimeError, match="At step 3, process 0: reward function 'far': status 503") as raised:
        mistakes.raise_everywhere(3)
    assert (type(raised.value) is RuntimeError) == is_bug and raised.value.__cause__ is errors[0]
    mistakes.raise_everywhere(4)  # once


@pytest.mark.parametrize("kind", ["batch", "running", "group"])
def test_where_all_scores_are_equal_those_of_tokens_stay_as_they_are(kind):
    """Divided by the deviation, a row of +1 and -1 would have token rewards of some 10,000."""
    scores, scales = RewardNormalizer(kind)(torch.full((4,), 0.3), ["a"] * 4)
    assert scores.abs().max() < 1e-3 and scales.tolist() == [1.0] * 4
