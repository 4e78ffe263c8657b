"""Old log-probs from the sampler or from a forward pass: the same numbers, by the way that the setting chooses."""

import pytest
import torch
from peft import LoraConfig
from torch._dynamo.utils import counters
from torch.testing import assert_close
from transformers import CompileConfig

from tests.models.test_packing import row_by_row
from tests.tiny import collected, randomize, tiny_gpt2, tiny_llama, tiny_lora_ppo, tiny_ppo
from trl_ext.models.packing import VARLEN, use_varlen

LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)


def rollouts(tmp_path, **config):
    """The rollouts of a run, and its trainer."""
    torch.manual_seed(0)
    trainer = tiny_ppo(tmp_path, **{"temperature": 0.7, "max_steps": 8} | config)
    seen = collected(trainer)
    trainer.train()
    return seen, trainer


@pytest.mark.slow
@pytest.mark.parametrize(
    "kwargs",
    [
        {"model": tiny_gpt2},
        {"model": tiny_llama, "peft_config": LORA},
        {"model": tiny_llama, "num_generations": 2},
    ],
    ids=["gpt2", "lora", "several answers"],
)
def test_the_samplers_logprobs_equal_those_of_a_forward_pass(tmp_path, kwargs):
    kwargs = {**kwargs, "optim": "sgd", "local_rollout_forward_batch_size": 3}
    build = kwargs.pop("model")
    (first, again), trainer = rollouts(tmp_path / "sampler", model=build(), old_logprobs="sampler", **kwargs)
    (other, _), computed = rollouts(tmp_path / "recompute", model=build(), old_logprobs="recompute", **kwargs)
    assert_close(first.completion_ids, other.completion_ids, rtol=0, atol=0)
    assert_close(first.logprobs, other.logprobs, rtol=1e-5, atol=1e-5)
    assert_close(first.values, other.values, rtol=1e-5, atol=1e-5)
    assert not torch.equal(first.logprobs, other.logprobs)  # by the sampler and by a forward pass
    logged = [log for log in trainer.state.log_history if "sampling/logprob_difference" in log]
    assert len(logged) == 2 and all(abs(log["sampling/logprob_difference"]) <= 1e-5 for log in logged)
    assert all(0 < log["sampling/logprob_difference_max"] <= 1e-5 for log in logged)
    assert not any("sampling/logprob_difference" in log for log in computed.state.log_history)
    assert again.kl("k1").abs().max() > 1e-3  # the policy has changed in between


def test_auto_uses_the_samplers_logprobs_where_they_are_exact(tmp_path):
    for trusted, config in [
        (True, {}),
        (False, {"bf16": True}),
        (False, {"disable_dropout": False}),
        (False, {"generation_kwargs": {"cache_implementation": "quantized"}}),
        (True, {"cache_implementation": "static", "generation_kwargs": {"max_cache_len": 32}}),
        (False, {"allow_off_policy_sampling": True, "top_k": 5}),
        (False, {"old_logprobs": "recompute"}),
        (False, {"top_k": 5}),
        (False, {"importance_sampling_mode": "token_truncate"}),
        (True, {"old_logprobs": "sampler", "bf16": True}),
        (True, {"old_logprobs": "sampler", "top_k": 5}),
    ]:
        assert tiny_ppo(tmp_path, **config)._trusts_sampler == trusted, config
    assert not tiny_ppo(tmp_path, tiny_llama().bfloat16())._trusts_sampler


@pytest.mark.slow
@pytest.mark.parametrize("build", [tiny_ppo, tiny_lora_ppo])
@pytest.mark.parametrize("attention", ["sdpa", VARLEN])
def test_compiled_decoding_samples_from_the_current_policy(build, attention, tmp_path, monkeypatch):
    """With `cache_implementation: static`; on a CPU transformers compiles only on request."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", row_by_row)
    use_varlen(model := tiny_llama())
    model.set_attn_implementation(attention)
    kwargs = {"cache_implementation": "static", "generation_kwargs": {"max_cache_len": 32}, "learning_rate": 1e-2}
    trainer = build(
        tmp_path,
        model=model,
        old_logprobs="recompute",
        importance_sampling_mode="token_truncate",
        max_steps=8,
        **kwargs,
    )
    trainer.generation_config.compile_config = CompileConfig(backend="eager", mode=None)
    trainer.generation_config.compile_config._compile_all_devices = True
    counters.clear()
    randomize(trainer.model)
    rollouts = collected(trainer)
    trainer.train()
    assert counters["stats"]["unique_graphs"] == 1
    for rollout in rollouts:
        assert ((rollout.logprobs - rollout.sampler_logprobs) * rollout.sampled_mask).abs().max() < 1e-5
    assert len(rollouts) == 2
