"""The gradient of a step does not depend on its split, and the first minibatch of a rollout is on-policy."""

import pytest
import torch
from peft import LoraConfig
from torch.testing import assert_close
from transformers import TrainerCallback

from tests.ppo.worker import topic_reward
from tests.tiny import rows_of, scripted, tiny_gpt2, tiny_llama, tiny_lora_ppo, tiny_ppo, weights, without_clock
from trl_ext import PPOTrainer
from trl_ext.models import lm_head


class _Gradients(TrainerCallback):
    """Keeps the gradients of the first optimizer step, before clipping."""

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        if state.global_step == 0:
            self.grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def first_gradients(output_dir, batch_size, accumulation, **kwargs):
    config = {
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": accumulation,
        "num_mini_batches": 1,
        "max_steps": 1,
        "max_grad_norm": 0.0,
        "entropy_coef": 0.05,
    } | kwargs
    trainer = scripted(tiny_ppo(output_dir, **config))
    with torch.no_grad():  # so that values are not 0, and the critic's backbone has a gradient
        torch.nn.init.normal_(trainer.model.critic.score.weight, generator=torch.Generator().manual_seed(3))
    gradients = _Gradients()
    trainer.add_callback(gradients)
    trainer.train()
    return gradients.grads, trainer


@pytest.mark.parametrize(
    "kwargs",
    [
        pytest.param({"model": tiny_gpt2}, id="gpt2"),
        pytest.param({}, id="llama", marks=pytest.mark.slow),
        pytest.param({"reward_funcs": topic_reward}, id="with unscored rows", marks=pytest.mark.slow),
        pytest.param({"num_mini_batches": 2}, id="two minibatches", marks=pytest.mark.slow),
    ],
)
def test_the_gradient_does_not_depend_on_the_micro_batches(kwargs, tmp_path):
    def gradients(batch_size, accumulation):
        made = {name: make() if name == "model" else make for name, make in kwargs.items()}
        return first_gradients(tmp_path / f"{batch_size}", batch_size, accumulation, **made)

    expected, trainer = gradients(8, 1)
    lengths = rows_of(trainer)["completion_mask"].sum(1)
    assert len(lengths.unique()) >= 4
    scored = rows_of(trainer)["loss_mask"].any(1)
    assert scored.all() != ("reward_funcs" in kwargs) and scored.sum() >= 2
    largest = {
        role: max(g.abs().max() for name, g in expected.items() if name.startswith(role))
        for role in ("policy", "critic")
    }
    for batch_size, accumulation in ((4, 2), (2, 4), (1, 8)):
        actual, _ = gradients(batch_size, accumulation)
        assert actual.keys() == expected.keys()
        for name, gradient in actual.items():
            bound = 1e-5 * largest[name.split(".")[0]].item()
            assert_close(gradient, expected[name], rtol=0, atol=bound, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("build", [pytest.param(tiny_ppo, marks=pytest.mark.slow), tiny_lora_ppo])
def test_policy_and_critic_have_separate_backward_passes(build, tmp_path, monkeypatch):
    """Weights and logs have the same bits as with one backward pass for both."""
    ends = []
    for apart in (True, False):
        monkeypatch.setattr(PPOTrainer, "_trains_apart", apart)
        trainer = scripted(build(tmp_path / str(apart), max_steps=4, gradient_accumulation_steps=2))
        backward, calls = trainer.accelerator.backward, []
        monkeypatch.setattr(trainer.accelerator, "backward", lambda loss, b=backward, c=calls: (c.append(1), b(loss)))
        trainer.train()
        ends.append((weights(trainer), [without_clock(log) for log in trainer.state.log_history]))
        assert len(calls) == 4 * 2 * (2 if apart else 1)
    (one, one_log), (other, other_log) = ends
    assert all(torch.equal(value, other[name]) for name, value in one.items()) and one_log == other_log


def log_ratios(trainer):
    """max |log ratio| of each micro-batch, over real tokens."""
    seen, updated = [], trainer.metrics.add_update

    def recording(logprobs, *args):
        inputs = args[-1]
        seen.append(((logprobs - inputs["old_logprobs"]) * inputs["loss_mask"]).abs().max().item())
        updated(logprobs, *args)

    trainer.metrics.add_update = recording
    trainer.train()
    return seen


DROPOUT = {
    "llama": lambda: tiny_llama(attention_dropout=0.5),
    "gpt2": lambda: tiny_gpt2(resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5),
}


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("model", DROPOUT)
def test_the_first_minibatch_is_on_policy(model, checkpointing, tmp_path):
    """For chunks of any size, with old log-probs of the sampler or of a forward pass."""
    for source, forward_batch_size in (("sampler", 4), ("recompute", 4), ("recompute", 3)):
        trainer = tiny_ppo(
            tmp_path,
            model=DROPOUT[model](),
            activation_checkpointing=checkpointing,
            local_rollout_forward_batch_size=forward_batch_size,
            old_logprobs=source,
            num_ppo_epochs=1,
            max_steps=4,
        )
        first, second, third, fourth = log_ratios(trainer)
        assert trainer.model.is_gradient_checkpointing == checkpointing
        # Two minibatches a rollout: the second is off-policy
        assert first <= 1e-5 and third <= 1e-5 and second > 1e-4 and fourth > 1e-4, source


@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.slow), True], ids=["full", "lora"])
def test_either_lm_head_trains_the_same_weights(lora, tmp_path, monkeypatch):
    """Each pass of policy and reference uses the head that the budget sets; only updates need entropies."""
    dense, calls, ended = lm_head.logprobs_and_entropies, [], []
    monkeypatch.setattr(lm_head, "logprobs_and_entropies", lambda *a: calls.append(a[-1]) or dense(*a))
    peft = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])} if lora else {}
    for budget in (1.0, 0.0):
        calls.clear()
        config = {"logits_budget_gb": budget, "entropy_coef": 0.05, "temperature": 0.7, "max_steps": 4}
        trainer = scripted(tiny_ppo(tmp_path, **peft, **config))
        trainer.train()
        assert calls == ([False] * (len(calls) - 4) + [True] * 4 if budget else [])
        assert not budget or len(calls) >= 6  # a pass of the policy, one of the reference, four updates
        ended.append(weights(trainer))
    assert_close(*ended, rtol=1e-5, atol=1e-5)
