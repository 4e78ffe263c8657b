"""`PPOConfig` honours or refuses every option of GRPO and of TRL 1.12's PPO."""

import dataclasses
import math

import pytest
from trl import GRPOConfig

from tests.tiny import tiny_config, tiny_ppo
from trl_ext import PPOConfig
from trl_ext.ppo.config import REFUSED, logger
from trl_ext.runs.settings import rules_of

# Fields of GRPOConfig that work as documented, or that GRPOConfig itself refuses. A new upstream
# field is in neither table and fails the test until it gets an entry.
HONOURED = """
    accelerator_config activation_checkpointing activation_checkpointing_kwargs adam_beta1 adam_beta2 adam_epsilon
    auto_find_batch_size bf16 cache_implementation chat_template_kwargs data_seed dataloader_in_order
    dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory
    dataloader_prefetch_factor ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters
    ddp_static_graph ddp_timeout debug deepspeed disable_dropout disable_tqdm do_eval do_predict do_train
    ds3_gather_for_generation enable_jit_checkpoint entropy_coef epsilon_high eval_delay eval_on_start eval_steps
    eval_strategy fp16
    fsdp fsdp_config full_determinism generation_kwargs gradient_accumulation_steps gradient_checkpointing
    gradient_checkpointing_kwargs greater_is_better hub_always_push hub_model_id hub_private_repo hub_revision
    hub_strategy hub_token learning_rate load_best_model_at_end local_rank log_completions log_level log_level_replica
    log_on_each_node log_unique_prompts logging_first_step logging_nan_inf_filter logging_steps logging_strategy
    lr_scheduler_kwargs lr_scheduler_type mask_truncated_completions max_completion_length max_grad_norm max_steps
    metric_for_best_model min_p model_init_kwargs num_completions_to_print num_generations
    num_generations_eval num_train_epochs optim optim_args optim_target_modules output_dir pad_to_multiple_of
    parallelism_config per_device_eval_batch_size per_device_train_batch_size project push_to_hub
    remove_unused_columns repetition_penalty report_to
    restore_callback_states_from_checkpoint resume_from_checkpoint reward_weights
    router_aux_loss_coef run_name save_on_each_node save_only_model save_steps save_strategy save_total_limit seed
    shuffle_dataset skip_memory_metrics temperature tf32 top_k top_p torch_empty_cache_steps
    trackio_bucket_id trackio_space_id trackio_static_space_id trust_remote_code use_cache use_cpu use_vllm
    vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port vllm_max_model_length vllm_mode vllm_model_impl
    vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_structured_outputs_regex
    vllm_tensor_parallel_size warmup_steps weight_decay generation_batch_size steps_per_generation
    include_for_metrics include_num_input_tokens_seen liger_kernel_config log_completions_hub_repo
    max_tool_calling_iterations transformers_continuous_batching_config
"""


def config(tmp_path, **kwargs):
    return tiny_config(tmp_path, **{"max_steps": -1, **kwargs})


def test_every_field_of_grpo_is_honoured_or_refused():
    """So no field that is new upstream is ignored in silence."""
    upstream, honoured = {f.name for f in dataclasses.fields(GRPOConfig)}, {*HONOURED.split()}
    assert honoured | REFUSED.keys() == upstream and not honoured & REFUSED.keys()
    ours = {f.name for f in dataclasses.fields(PPOConfig)} - upstream
    assert len(ours) <= 52


def test_a_refused_field_raises_with_its_reason(subtests, tmp_path):
    for name, reason in REFUSED.items():
        with subtests.test(name=name), pytest.raises(ValueError) as error:
            default = {f.name: f.default for f in dataclasses.fields(PPOConfig)}[name]
            config(tmp_path, **{name: not default if isinstance(default, bool) else "x"})
        assert reason in str(error.value)


def test_copies_of_a_config_are_equal_and_may_change(tmp_path):
    original = config(
        tmp_path,
        kl_coef=0.1,
        cliprange=0.3,
        num_mini_batches=3,
        gradient_accumulation_steps=2,
        metric_for_best_model="eval_objective/kl",
        generation_kwargs='{"use_cache": false}',
        num_generations=2,
        total_episodes=100,
    )
    assert PPOConfig(**original.to_dict()) == original
    assert dataclasses.replace(original) == original

    changed = dataclasses.replace(original, kl_coef=0.7)
    assert changed.kl_coef == 0.7 and dataclasses.replace(changed, kl_coef=0.1) == original
    original.total_episodes, original.max_steps = None, -1
    changed = dataclasses.replace(original, num_mini_batches=5)
    assert (changed.steps_per_generation, changed.generation_batch_size) == (10, 40)
    changed = dataclasses.replace(original, per_device_train_batch_size=2, gradient_accumulation_steps=1)
    assert (changed.num_mini_batches, changed.batch_size) == (3, 6)


def test_a_rollout_size_that_is_not_used_is_reported(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(logger, "warning_once", said.append)
    original = config(tmp_path, num_mini_batches=3)
    dataclasses.replace(original)
    assert not said
    config(tmp_path, steps_per_generation=4, generation_batch_size=64)
    assert "`steps_per_generation=4` and `generation_batch_size=64`" in said[0]


def test_batch_arithmetic(subtests, tmp_path):
    for per_device, accumulation, mini_batches, epochs, episodes, steps in [
        (4, 1, 1, 1, 12, 3),
        (4, 1, 2, 2, 16, 8),  # two rollouts of 8 episodes in 2 minibatches, two PPO epochs
        (4, 1, 2, 2, 17, 12),  # rounded up to full rollouts
        (2, 3, 4, 5, 48, 40),
        (1, 8, 1, 4, 1, 4),
    ]:
        with subtests.test(episodes=episodes, steps=steps):
            args = config(
                tmp_path,
                per_device_train_batch_size=per_device,
                gradient_accumulation_steps=accumulation,
                num_mini_batches=mini_batches,
                num_ppo_epochs=epochs,
                total_episodes=episodes,
            )
            assert args.mini_batch_size == per_device * accumulation
            assert args.batch_size == per_device * accumulation * mini_batches
            assert args.generation_batch_size == args.batch_size  # TRL's generation batch
            assert args.steps_per_generation == accumulation * mini_batches
            assert args.max_steps == steps == math.ceil(episodes / args.batch_size) * mini_batches * epochs


RANGES = {  # a value outside of each range, and the settings that it needs
    "adam_epsilon": 0.0,
    "cliprange": 0.0,
    "cliprange_value": 0.0,
    "critic_learning_rate": -1e-6,
    "critic_warmup_rollouts": -1,
    "dual_clip": 1.0,
    "entropy_coef": -0.1,
    "gamma": 1.01,
    "importance_sampling_clip_max": 0.99,
    "importance_sampling_clip_min": math.nan,
    "kl_coef": math.inf,
    "kl_coef_max": -0.1,
    "kl_coef_min": -0.1,
    "kl_estimator": "none of them",
    "kl_horizon": 0,
    "kl_target": 0.0,
    "lam": 1.01,
    "lam_alpha": math.inf,
    "lam_value": -0.1,
    "local_rollout_forward_batch_size": 0,
    "logits_budget_gb": -1.0,
    "missing_eos_penalty": -1.0,
    "num_generations": 0,
    "num_mini_batches": 0,
    "num_ppo_epochs": 0,
    "step_kl_target": -0.1,
    "ratio_band": [1.0, 2.0],
    "reward_weights": [0, 0.0],
    "rollouts_ahead": 2,
    "tool_timeout": 0.0,
    "total_episodes": 0,
    "vf_coef": -0.1,
}


def test_ranges(subtests, tmp_path):
    ruled = {each.name for each in dataclasses.fields(PPOConfig) if rules_of(each)[0]}
    assert RANGES.keys() == ruled  # every rule is tested
    for name, bad in RANGES.items():
        needed = {"kl_controller": "adaptive"} if name.startswith("kl_") else {}
        with subtests.test(name=name), pytest.raises(ValueError, match=f"`{name}` must be "):
            config(tmp_path, **needed | {name: bad})


def test_a_setting_of_an_unused_mode_raises(subtests, tmp_path):
    for name, value, setting, *given in [
        ("kl_target", 3.0, "kl_controller='adaptive'"),
        ("cliprange", 0.3, "ratio_band=None", {"ratio_band": [0.7, 6.0]}),
        ("epsilon_high", 0.3, "ratio_band=None", {"ratio_band": [0.7, 6.0]}),
        ("lam", 0.9, "lam_alpha=None", {"lam_alpha": 1.5}),
        ("reward_group_column", "topic", "reward_normalization='group'"),
    ]:
        with subtests.test(name=name), pytest.raises(ValueError, match=f"`{name}={value}` needs `{setting}`"):
            config(tmp_path, **{name: value}, **dict(*given))


GREEDY = {"generation_kwargs": {"do_sample": False}, "allow_off_policy_sampling": True}
CONTRADICTIONS = [
    ({"kl_controller": "adaptive", "kl_coef": 0.0}, "cannot change `kl_coef=0`"),
    ({"watch": "raise_kl", "kl_coef": 0.0}, "cannot change `kl_coef=0`"),
    ({"kl_controller": "adaptive", "kl_coef_min": 0.2, "kl_coef_max": 0.1}, "above `kl_coef_max=0.1`"),
    ({"importance_sampling_mode": "token_mask", "importance_sampling_clip_max": None}, "needs a bound"),
    ({"use_ref_model": False}, "`use_ref_model=False` loads no reference"),
    ({"reward_normalization": "group"}, "needs `reward_group_column`"),
    ({"missing_eos_score": -1.0, "missing_eos_penalty": 1.0}, "`missing_eos_score`, here -1.0"),
    ({"mask_truncated_completions": True, "missing_eos_score": -1.0}, "Set only one of the three"),
    ({"auto_find_batch_size": True}, "auto_find_batch_size"),
    ({"num_generations": 3}, r"\(8\) must be divisible by num_generations \(3\)"),
    ({"total_episodes": 16, "max_steps": 9}, "`total_episodes=16` makes 8 optimizer steps"),
    ({"rollouts_ahead": 1, "use_vllm": True, "vllm_mode": "colocate"}, "needs a vLLM server"),
    ({"generation_kwargs": {"stop_strings": ["."]}}, "set `stop_token_id`"),
    ({"generation_kwargs": '{"max_new_tokens": 9}'}, "`max_completion_length`"),
    ({"generation_kwargs": {"seed": 1}, "num_generations": 2}, "the same text"),
    ({"old_logprobs": "sampler", "importance_sampling_mode": "token_mask"}, "has no effect"),
    (GREEDY, "decodes greedily"),
    ({**GREEDY, "old_logprobs": "sampler"}, "decodes greedily"),
]


@pytest.mark.parametrize(("kwargs", "message"), CONTRADICTIONS, ids=[message for _, message in CONTRADICTIONS])
def test_contradictions(tmp_path, kwargs, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **kwargs)


def test_another_sampler_needs_a_correction_or_permission(subtests, tmp_path):
    for kwargs in [
        {"top_k": 50},
        {"top_p": 0.9},
        {"min_p": 0.05},
        {"repetition_penalty": 1.2},
        {"generation_kwargs": {"typical_p": 0.9}},
        {"generation_kwargs": '{"top_k": 50}'},  # as the command line passes it
    ]:
        with subtests.test(kwargs=kwargs):
            assert config(tmp_path, **kwargs).importance_correction == "token_truncate"
            assert config(tmp_path, **kwargs, old_logprobs="sampler").importance_correction == "none"
            uncorrected = {**kwargs, "importance_sampling_mode": "none"}
            with pytest.raises(ValueError, match="allow_off_policy_sampling=True"):
                config(tmp_path, **uncorrected)
            assert config(tmp_path, **uncorrected, allow_off_policy_sampling=True).importance_correction == "none"


def test_which_samplers_are_corrected_for(subtests, tmp_path):
    neutral = {"top_k": None, "top_p": 1.0, "temperature": 0.7, "generation_kwargs": '{"use_cache": true}'}
    for expected, kwargs in [
        ("none", {}),
        ("none", neutral),
        ("token_truncate", {"use_vllm": True}),
        ("token_truncate", {"cache_implementation": "quantized"}),
        ("token_truncate", {"allow_off_policy_sampling": True}),
        ("none", {"allow_off_policy_sampling": True, "old_logprobs": "sampler"}),
        ("sequence_mask", {"importance_sampling_mode": "sequence_mask"}),
        ("none", {**GREEDY, "importance_sampling_mode": "none"}),
    ]:
        with subtests.test(kwargs=kwargs):
            assert config(tmp_path, **kwargs).importance_correction == expected


def test_the_default_clip_range(tmp_path):
    assert config(tmp_path, kl_coef=0.05).resolved_cliprange == 0.2
    assert config(tmp_path, kl_coef=0.0, epsilon_high=0.28).resolved_cliprange == 0.2
    assert config(tmp_path, kl_coef=0.0, cliprange=0.3).resolved_cliprange == 0.3
    trainer = tiny_ppo(tmp_path, kl_coef=0.0)
    assert (trainer.epsilon_low, trainer.epsilon_high) == (0.4, 0.4)
