"""`critic_steps`, `critic_trains`, `lam_alpha` and `ratio_band` in training."""

import pytest
import torch
from peft import LoraConfig
from torch import nn

from tests.ppo.worker import (
    RESUMED,
    EachStep,
    collected,
    end_state,
    make_trainer,
    rows_of,
    scripted,
    weights,
)
from tests.tiny import tiny_llama
from trl_ext.functional import gae
from trl_ext.models.mlps import is_in_mlp

EXACT = {"rtol": 0, "atol": 0, "equal_nan": True}
# A rollout of two minibatches of two micro-batches; two epochs of three passes, the third of which moves the policy
THREE = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_mini_batches": 2, "critic_steps": 3}
THREE |= {"num_ppo_epochs": 2, "logging_steps": 1, "weight_decay": 0.5}


def moved(trainer):
    """Run it; which roles each optimizer step has moved, and what was seen after each."""

    def moments():
        state = trainer.optimizer.state if trainer.optimizer else {}
        named = trainer.model.policy.named_parameters()
        return {name: state[p]["exp_avg"].clone() for name, p in named if state.get(p)}

    watch = EachStep(lambda: (weights(trainer), moments()))
    trainer.add_callback(watch)
    trainer.train()
    pairs = zip(watch.seen, watch.seen[1:], strict=False)
    return [{name.split(".")[0] for name in a if not torch.equal(a[name], b[name])} for (a, _), (b, _) in pairs], watch


@pytest.mark.slow
def test_all_but_the_last_of_the_critics_steps_leave_the_policy_alone(tmp_path):
    trainer = make_trainer(tmp_path, **THREE, kl_controller="adaptive", kl_horizon=10, max_steps=24)
    calls = []
    trainer.model.policy.register_forward_hook(lambda *_: calls.append((trainer._step, torch.is_grad_enabled())))
    steps, watch = moved(trainer)
    alone, both = {"critic"}, {"critic", "policy"}
    assert steps == 2 * (4 * [alone] + 2 * [both] + 4 * [alone] + 2 * [both])
    # Four micro-batches a pass, of which the policy is run in the third and the sixth alone
    assert [step for step, is_trained in calls if is_trained] == [
        24 * rollout + step for rollout in (0, 1) for step in (*range(8, 12), *range(20, 24))
    ]

    # Neither do its moments decay
    assert not any(moments for _, moments in watch.seen[:5]) and len(watch.seen[6][1]) > 10
    for step in (7, 8, 9, 10):
        torch.testing.assert_close(watch.seen[step][1], watch.seen[6][1], **EXACT)
    assert not torch.equal(watch.seen[11][1]["lm_head.weight"], watch.seen[6][1]["lm_head.weight"])

    logs = trainer.state.log_history[:-1]
    for log, roles in zip(logs, steps, strict=True):
        about_policy = {"policy/approxkl_avg", "policy/clipfrac_avg", "policy/entropy_avg", "loss/policy_avg"}
        about_policy |= {"val/ratio", "grad_norm/policy"}
        assert about_policy & log.keys() == (about_policy if "policy" in roles else set())
        assert {"loss/value_avg", "val/clipfrac_avg", "grad_norm/critic"} <= log.keys()
    # The KL of the first rollout is 0, so its controller moves the coefficient once by −0.2 · 8 / 10
    assert [log["objective/kl_coef"] for log in logs if "objective/kl_coef" in log] == pytest.approx(
        [0.05, 0.05 * (1 - 0.2 * 8 / 10)]
    )
    # The sampler's log-probs are compared before the policy has moved, though the critic has
    assert [i for i, log in enumerate(logs) if "sampling/logprob_difference" in log] == [4, 16]


@pytest.mark.slow
def test_a_critic_that_does_not_learn_makes_its_steps_count_for_nothing(tmp_path):
    ends = []
    for steps in (1, 3):
        config = {"num_mini_batches": 1, "per_device_train_batch_size": 8, "lr_scheduler_type": "constant"}
        config |= {"critic_steps": steps, "critic_learning_rate": 0.0, "max_steps": 4 * steps, "vf_coef": 1.0}
        trainer = scripted(make_trainer(tmp_path, **config))
        trainer.train()
        ends.append({name: p for name, p in weights(trainer).items() if name.startswith("policy.")})
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_run_resumed_at_any_of_its_steps_ends_as_one_that_was_not(tmp_path):
    config = RESUMED | THREE | {"critic_trains": "mlp", "lam_alpha": 1.5, "ratio_band": [0.9, 1.2], "max_steps": 17}
    whole = make_trainer(tmp_path, save_strategy="steps", save_steps=1, **config)
    whole.train()
    for step in (5, 14):  # the policy's first step on a rollout, with more to come; the critic's on the second
        resumed = make_trainer(tmp_path / "again", **config)
        resumed.train(str(tmp_path / f"checkpoint-{step}"))
        torch.testing.assert_close(end_state(resumed), end_state(whole), **EXACT)


def test_a_rollout_that_went_too_far_does_not_stop_the_critics_steps_on_the_next(tmp_path):
    config = {"num_mini_batches": 1, "per_device_train_batch_size": 8, "critic_steps": 2, "learning_rate": 1e-2}
    trainer = make_trainer(tmp_path, **config, max_approx_kl=1e-9, max_steps=8)
    steps, _ = moved(trainer)
    # The second update of the policy, on the fourth pass, goes too far and is left out; the next rollout begins anew
    assert steps == 2 * [{"critic"}, {"critic", "policy"}, {"critic"}, set()]


def test_lam_follows_the_length_for_the_advantages_and_is_1_for_the_returns(tmp_path):
    for kwargs, lam_value in [({}, 1.0), ({"lam_value": 0.5}, 0.5)]:
        config = {"baseline": "critic", "lam_alpha": 0.4, "normalize_advantages": False, "max_steps": 1} | kwargs
        trainer = scripted(make_trainer(tmp_path, **config))
        rollouts, seen, observe = collected(trainer), [], trainer.metrics.collected
        trainer.metrics.collected = lambda *args, seen=seen, observe=observe: (seen.append(args), observe(*args))
        trainer.train()
        (rollout,), ((_, _, _, rewards, advantages, returns, _),) = rollouts, seen
        for row, length in enumerate(rollout.mask.sum(1).tolist()):
            own = [each[row : row + 1] for each in (rewards, rollout.values, rollout.mask)]
            lam = max(0.0, 1 - 1 / (0.4 * length))
            torch.testing.assert_close(advantages[row : row + 1], gae(*own, 1.0, lam))
            torch.testing.assert_close(returns[row : row + 1], own[1] + gae(*own, 1.0, lam_value))
        assert len({*rollout.mask.sum(1).tolist()}) > 3  # 0.4 · length is below and above 1


@pytest.mark.slow
def test_the_share_outside_of_the_band_is_logged_and_a_band_without_anything_in_it_trains_the_critic_alone(tmp_path):
    trainer = make_trainer(tmp_path, ratio_band=[0.5, 2.0], learning_rate=1e-2, max_steps=4)
    trainer.train()
    rows = rows_of(trainer)
    assert rows["advantages"].abs().max() > 0
    logs = trainer.state.log_history[:-1]
    assert logs[0]["policy/clipfrac_avg"] == 0 < logs[-1]["policy/clipfrac_avg"] < 1

    trainer = make_trainer(tmp_path, ratio_band=[0.5, 2.0], max_steps=4)
    trainer.args.ratio_band = [3.0, 4.0]
    steps, _ = moved(trainer)
    assert steps == 4 * [{"critic"}]
    assert [log["policy/clipfrac_avg"] for log in trainer.state.log_history[:-1]] == 4 * [1.0]


@pytest.mark.slow
def test_the_critics_mlps_alone_are_trained_and_optimized(subtests, tmp_path, recwarn):
    everything = ["q_proj", "v_proj", "gate_proj", "down_proj"]
    lora = {"peft_config": LoraConfig(r=2, target_modules=everything, task_type="CAUSAL_LM")}
    checkpointing = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}}
    for name, kwargs, config in [("full", {}, {}), ("LoRA", lora, {}), ("reentrant", {}, checkpointing)]:
        with subtests.test(name=name):
            trainer = make_trainer(tmp_path, trainer_kwargs=kwargs, critic_trains="mlp", max_steps=3, **config)
            start = weights(trainer)
            trainer.train()
            end = weights(trainer)
            critic = {n: p for n, p in trainer.model.named_parameters() if "critic" in n.split(".")}
            expected = {n for n in critic if ".mlp." in n or n.endswith("score.weight")}
            assert 0 < len(expected) < len(critic)
            assert {n for n in critic if not torch.equal(start[n], end[n])} == expected
            assert {n for n, p in critic.items() if p.requires_grad} == expected
            optimized = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
            assert {n for n, p in critic.items() if id(p) in optimized} == expected
            assert {n for n, p in critic.items() if p in trainer.optimizer.state} == expected
    assert not any(
        "LoRA matrices B" in str(warning.message) for warning in recwarn
    )  # they are meant to be as they were


def test_checkpointing_leaves_the_gradients_of_a_critic_that_trains_its_mlps_as_they_are(tmp_path):
    gradients = []
    for config in ({}, {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}}):
        settings = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 1e9, "vf_coef": 1.0, "max_steps": 1}
        trainer = scripted(make_trainer(tmp_path, critic_trains="mlp", **settings, **config))
        nn.init.normal_(trainer.model.critic.score.weight, generator=torch.Generator().manual_seed(0))
        before = weights(trainer)
        trainer.train()
        gradients.append({n: before[n] - p for n, p in weights(trainer).items() if n.startswith("critic.")})
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)
    assert gradients[0]["critic.model.layers.0.mlp.up_proj.weight"].abs().max() > 0


def test_an_adapter_without_mlps_is_refused_with_what_to_set(tmp_path):
    lora = {"peft_config": LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")}
    with pytest.raises(ValueError, match="no trainable weight of the critic's adapter is in an MLP: give") as error:
        make_trainer(tmp_path, trainer_kwargs=lora, critic_trains="mlp")
    assert "`critic_peft_config` target modules in MLPs, such as gate_proj" in str(error.value)
    mlps = {"critic_peft_config": LoraConfig(r=2, target_modules=["up_proj"], task_type="CAUSAL_LM")}
    trainer = make_trainer(tmp_path, trainer_kwargs=lora | mlps, critic_trains="mlp")
    trained = {n for n, p in trainer.model.named_parameters() if "critic" in n.split(".") and p.requires_grad}
    assert all(is_in_mlp(name) or name == "critic.score.weight" for name in trained) and len(trained) == 5


def test_gradients_and_moments_of_what_is_frozen_take_no_memory(tmp_path):
    model = tiny_llama()
    bytes_of = {}
    for trains in ("all", "mlp"):
        trainer = make_trainer(tmp_path, model=model, critic_trains=trains, max_steps=1)
        trainer.train()
        critic = [*trainer.model.parameters_of("critic")]
        moments = [v for p in critic for v in trainer.optimizer.state[p].values() if v.ndim]
        bytes_of[trains] = sum(m.nbytes for m in moments)
        assert bytes_of[trains] == 2 * sum(p.nbytes for p in critic if p.requires_grad)
    # Of 16 × 32 weights three matrices in each of two layers, and 16 of the head, in float32
    assert bytes_of["mlp"] == 2 * 4 * (2 * 3 * 16 * 32 + 16) < bytes_of["all"]
