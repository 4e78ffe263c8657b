"""Plans of tiny runs against formulas, and settings that are refused or warned of."""

import math

import pytest
import torch
from peft import LoraConfig
from trl import SFTConfig

from tests.tiny import tiny_config, tiny_llama
from trl_ext.workbench.planning import (
    Job,
    Layout,
    LoadedReward,
    known_not_to_work,
    known_to_go_wrong,
    plan,
)
from trl_ext.workbench.planning.memory import quantized_bytes

CONFIG = tiny_llama(num_hidden_layers=3).config
PARAMS = sum(p.numel() for p in tiny_llama(num_hidden_layers=3).parameters())
LORA = {"r": 2, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def sft(**kwargs):
    defaults = {"use_cpu": True, "bf16": False, "max_length": 32, "activation_checkpointing": False}
    return SFTConfig("out", **{**defaults, **kwargs})


def ppo(**kwargs):
    return tiny_config("out", **kwargs)


def role(result, name):
    (found,) = [role for role in result.roles if role.name == name]
    return found


@pytest.mark.slow
def test_bytes_per_parameter_of_each_mode(subtests):
    # Of one process of four; DeepSpeed and FSDP2 in bfloat16 mixed precision
    for mode, weights, gradients, optimizer in [
        ("single", 4, 4, 8),
        ("ddp", 4, 8, 8),
        ("zero0", 2, 2, 12),
        ("zero2", 2, 2 / 4, 12 / 4),
        ("zero3", 2 / 4, 2 / 4, 12 / 4),
        ("fsdp2", 4 / 4, 4 / 4, 8 / 4),
    ]:
        with subtests.test(mode=mode):
            layout = Layout(mode, 1 if mode == "single" else 4)
            (model,) = plan(Job("sft", sft(bf16=mode not in ("single", "ddp")), CONFIG, layout)).roles
            assert model.parameters == model.trained == PARAMS
            expected = [weights * PARAMS, gradients * PARAMS, optimizer * PARAMS]
            assert [model.weights, model.gradients, model.optimizer] == pytest.approx(expected, abs=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_which_modes_cast_in_mixed_precision(dtype):
    # accelerate puts autocast on the model's forward, in one process and under DDP, for any dtype of the weights
    found = {
        mode: Job("sft", sft(bf16=True), CONFIG, Layout(mode), dtype=dtype).autocast
        for mode in ("single", "ddp", "zero2", "zero3", "fsdp2")
    }
    assert found == {**dict.fromkeys(found), "single": torch.bfloat16, "ddp": torch.bfloat16}
    assert Job("sft", sft(bf16=False), CONFIG, Layout("ddp"), dtype=dtype).autocast is None


@pytest.mark.slow
def test_offloading_moves_bytes_to_the_cpu():
    on_gpu, offloaded = (
        plan(Job("sft", sft(bf16=True), CONFIG, Layout("zero3", 2, offloads_weights=o, offloads_optimizer=o)))
        for o in (False, True)
    )
    assert offloaded.resident == 0 and offloaded.host == on_gpu.resident


@pytest.mark.slow
def test_a_quantised_base_and_its_adapter():
    job = Job("sft", sft(), CONFIG, dtype=torch.bfloat16, peft_config=LoraConfig(**LORA), bits=4, nested=True)
    (model,) = plan(job).roles
    linear = 3 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32)  # q, o; k, v; the MLP's three
    adapter = 3 * 2 * (4 * 16 + 2 * (16 + 16) + 2 * (16 + 8) + 3 * (16 + 32) - 4 * 16)
    assert model.trained == adapter
    assert model.weights == quantized_bytes(linear, 4, True) + 2 * (PARAMS - linear) + 2 * adapter


@pytest.mark.slow
def test_ppo_has_four_models_or_one_base_with_adapters():
    full = plan(Job("ppo", ppo(), CONFIG, rewards=(CONFIG,), prompt_length=8))
    head = 16 + PARAMS - len_of_lm_head()
    assert [(r.name, r.parameters) for r in full.roles] == [
        ("policy", PARAMS),
        ("critic", head),
        ("reference", PARAMS),
        ("reward model", head),
    ]
    assert role(full, "reference").gradients == role(full, "reward model").optimizer == 0
    shared = plan(Job("ppo", ppo(), CONFIG, peft_config=LoraConfig(**LORA), shared_rewards=1, prompt_length=8))
    adapter = role(shared, "policy").trained
    assert role(shared, "critic").trained == role(shared, "critic").parameters == adapter + 16
    assert role(shared, "reference").weights == role(shared, "reward model").weights == 0
    assert shared.peak < full.peak


@pytest.mark.slow
def test_reward_models_are_counted_on_each_process_and_a_shared_base_once():
    loaded = (LoadedReward(CONFIG, torch.bfloat16), LoadedReward(CONFIG, members=3))
    counted = plan(Job("ppo", ppo(), CONFIG, Layout("ddp", 2), prompt_length=8, loaded_rewards=loaded))
    head = 16 + PARAMS - len_of_lm_head()
    roles = [role for role in counted.roles if role.name == "reward function"]
    assert [role.weights for role in roles] == [2 * head, 4 * head, 0, 0]
    assert [role.parameters for role in roles] == [head] * 4  # each has its own pass
    assert LoadedReward(CONFIG, max_batch_tokens=100, batch_size=8).rows(64, 16) == 6


@pytest.mark.slow
def test_on_a_gpu_the_lm_head_computes_in_place():
    config = tiny_llama(vocab_size=20_000).config
    on_cpu, on_gpu = (ppo(max_completion_length=100, logits_budget_gb=0.0) for _ in range(2))
    on_gpu.use_cpu = False
    peaks = [
        plan(Job("ppo", args, config, prompt_length=8)).phases["update"]["activations"] for args in (on_cpu, on_gpu)
    ]
    logits = 4 * on_cpu.per_device_train_batch_size * 100 * 20_000
    assert peaks[0] - peaks[1] > 3 * logits and peaks[1] < 2 * logits


def len_of_lm_head():
    return tiny_llama().lm_head.weight.numel()


@pytest.mark.slow
def test_the_schedule_is_that_of_the_trainer():
    # 4 per device × 3 accumulated × 2 processes = 24 in a minibatch; 2 minibatches = 48 in a rollout; 2 epochs
    args = ppo(gradient_accumulation_steps=3, max_steps=-1, total_episodes=100)
    schedule = plan(Job("ppo", args, CONFIG, Layout("ddp", 2), prompt_length=8)).schedule
    assert schedule == {
        "episodes per minibatch (optimizer step)": 24,
        "episodes per rollout": 48,
        "prompts per rollout": 48,
        "optimizer steps per rollout": 4,
        "tokens per rollout, at most": 48 * 16,
        "generated tokens per rollout, at most": 48 * 8,
        "rollouts": 3,
        "optimizer steps": 12,
    }


@pytest.mark.slow
def test_fsdp2_gathers_the_root_and_two_layers_or_a_reference():
    """A critic of five layers beside a policy of three; tests/distributed shows that FSDP2 wraps both so."""
    critic = tiny_llama(num_hidden_layers=5).config
    layer = 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32 + 2 * 16  # q, o; k, v; the MLP's three; norms
    root = 2 * 29 * 16 + 16 + 29 * 16 + 16 + 16  # embeddings, LM head, norm; embeddings, norm, head
    phases = plan(Job("ppo", ppo(bf16=True), CONFIG, Layout("fsdp2", 2), value_model=critic, prompt_length=8)).phases
    assert phases["update"]["gathered weights"] == 2 * (root + 2 * layer)
    assert phases["score"]["gathered weights"] == 2 * (root + PARAMS)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (Job("sft", sft(), CONFIG, bits=4), "a base in 4 bits cannot be trained"),
        (Job("sft", sft(), CONFIG, Layout("zero2", 2, accumulation=4)), "fix gradient_accumulation_steps to 4"),
        (
            Job("ppo", ppo(critic_warmup_rollouts=1), CONFIG, Layout("zero2", 2)),
            "skips updates of the policy, but DeepSpeed",
        ),
    ],
)
def test_an_impossible_run_is_refused_with_the_reason(job, message):
    (reason,) = known_not_to_work(job)
    assert message in reason


@pytest.mark.parametrize(
    ("stage", "args", "known", "message"),
    [
        ("ppo", {"kl_coef": 0.0}, {}, "without a KL penalty"),
        ("ppo", {}, {"shared_prompts": "12 of PPO's 16 prompts are SFT's, too"}, "12 of PPO's 16 prompts"),
        ("ppo", {"kl_coef": 0.05}, {}, None),
        ("dpo", {}, {"pairs": 9_999}, "9999 preference pairs"),
    ],
)
def test_risky_settings_are_warned_of_and_sound_ones_are_not(stage, args, known, message):
    warnings = known_to_go_wrong(Job(stage, ppo(**args), CONFIG, prompt_length=8), **known)
    assert [message in warning for warning in warnings] == ([True] if message else [])


@pytest.mark.slow
def test_generation_on_other_gpus_is_counted_there():
    plain, vllm = (plan(Job("ppo", ppo(**kwargs), CONFIG, prompt_length=8)) for kwargs in ({}, {"use_vllm": True}))
    assert not plain.beside and not plain.host
    cache = 2 * 3 * 2 * 4 * 16 * 2  # keys and values, layers, heads of 4, tokens, 16 bits
    assert vllm.beside == {"weights": 2 * PARAMS, "KV cache": 8 * cache}
    assert not vllm.phases["generate"]


@pytest.mark.slow
def test_a_checkpoint_in_the_background_needs_cpu_memory():
    kept = plan(Job("ppo", ppo(save_in_background=True), CONFIG, Layout("zero3", 4), prompt_length=8))
    assert kept.host == math.ceil(kept.checkpoint / 4)
