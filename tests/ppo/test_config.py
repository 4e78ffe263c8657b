"""`PPOConfig`: every option of RLOO and of TRL 1.12's PPO is honoured, mapped or refused, none is silently ignored."""

import dataclasses
import json
import math
import re

import pytest
import torch
from trl import RLOOConfig

from tests.models.test_hostile_checkpoint import HOSTILE
from tests.tiny import length_reward, prompts, tiny_config, tiny_llama, tiny_tokenizer
from trl_ext import PPOConfig, PPOTrainer
from trl_ext.functional import LAM_SCHEDULES
from trl_ext.ppo.config import (
    ALIASES,
    INHERITED_RANGES,
    OFF_POLICY_GENERATION_KWARGS,
    ON_POLICY_GENERATION_KWARGS,
    REFUSED,
)
from trl_ext.runs.settings import rules_of

# Fields of RLOOConfig that do here what their documentation says, or that RLOOConfig itself refuses. A new upstream
# field is in none of the tables and fails the test until somebody decides.
HONOURED = """
    accelerator_config activation_checkpointing activation_checkpointing_kwargs adam_beta1 adam_beta2 adam_epsilon
    auto_find_batch_size bf16 cache_implementation chat_template_kwargs data_seed dataloader_in_order
    dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory
    dataloader_prefetch_factor ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters
    ddp_static_graph ddp_timeout debug deepspeed disable_dropout disable_tqdm do_eval do_predict do_train
    ds3_gather_for_generation enable_jit_checkpoint epsilon_high eval_delay eval_on_start eval_steps eval_strategy fp16
    fsdp fsdp_config full_determinism generation_kwargs gradient_accumulation_steps gradient_checkpointing
    gradient_checkpointing_kwargs greater_is_better hub_always_push hub_model_id hub_private_repo hub_revision
    hub_strategy hub_token learning_rate load_best_model_at_end local_rank log_completions log_level log_level_replica
    log_on_each_node log_unique_prompts logging_first_step logging_nan_inf_filter logging_steps logging_strategy
    lr_scheduler_kwargs lr_scheduler_type mask_truncated_completions max_completion_length max_grad_norm max_steps
    metric_for_best_model min_p model_init_kwargs normalize_advantages num_completions_to_print num_generations
    num_generations_eval num_train_epochs optim optim_args optim_target_modules output_dir pad_to_multiple_of
    parallelism_config per_device_eval_batch_size per_device_train_batch_size project push_to_hub
    ref_model_mixup_alpha ref_model_sync_steps remove_unused_columns repetition_penalty report_to
    restore_callback_states_from_checkpoint resume_from_checkpoint reward_clip_range reward_weights
    router_aux_loss_coef run_name save_on_each_node save_only_model save_steps save_strategy save_total_limit seed
    shuffle_dataset skip_memory_metrics sync_ref_model temperature tf32 top_k top_p torch_empty_cache_steps
    trackio_bucket_id trackio_space_id trackio_static_space_id trust_remote_code use_cache use_cpu use_vllm
    vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port vllm_max_model_length vllm_mode vllm_model_impl
    vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_structured_outputs_regex
    vllm_tensor_parallel_size warmup_steps weight_decay
"""
# Other names of something: field -> what it sets. `test_mapped_fields_set_what_they_name` sees each do so.
MAPPED = {
    **ALIASES,
    "generation_batch_size": "num_mini_batches",
    "steps_per_generation": "num_mini_batches",
}


def config(tmp_path, **kwargs):
    return tiny_config(tmp_path, **{"max_steps": -1, **kwargs})


def test_every_field_of_rloo_is_honoured_mapped_or_refused():
    """A field that is new upstream fails here, so that none is ignored in silence."""
    tables = {"honoured": HONOURED.split(), "mapped": MAPPED, "refused": REFUSED}
    upstream = {f.name for f in dataclasses.fields(RLOOConfig)}
    for name in upstream:
        where = [table for table, members in tables.items() if name in members]
        assert len(where) == 1, f"`{name}` is in {where or 'no table'}: decide what PPO does with it."
    assert upstream >= set(HONOURED.split())  # no entry outlives its field


OTHER_VALUES = {  # where a flipped bool or the string "x" would not do
    "eval_accumulation_steps": 2,
    "include_for_metrics": ["loss"],
    "label_names": ["labels"],
    "label_smoothing_factor": 0.1,
    "liger_kernel_config": {"rope": True},
    "neftune_noise_alpha": 5.0,
    "torch_compile_backend": "eager",
    "train_sampling_strategy": "group_by_length",
    "transformers_continuous_batching_config": {"max_memory_percent": 0.5},
}


def test_a_refused_field_raises_with_its_reason(subtests, tmp_path):
    for name in sorted(REFUSED):
        with subtests.test(name=name):
            default = {f.name: f.default for f in dataclasses.fields(PPOConfig)}[name]
            value = not default if isinstance(default, bool) else OTHER_VALUES.get(name, "x")
            with pytest.raises(ValueError) as error:
                config(tmp_path, **{name: value})
            assert f"`{name}={value}`" in str(error.value) and REFUSED[name] in str(error.value)


def test_mapped_fields_set_what_they_name(subtests, tmp_path):
    for alias, name, one, other in [
        ("beta", "kl_coef", 0.2, 0.1),
        ("beta", "kl_coef", 0.0, 0.1),  # a falsy alias counts
        ("epsilon", "cliprange", 0.3, 0.1),
        ("num_iterations", "num_ppo_epochs", 3, 2),
    ]:
        with subtests.test(alias=alias, one=one):

            def plain(**kwargs):
                return PPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", **kwargs)

            assert getattr(plain(**{alias: one}), name) == one
            assert getattr(plain(**{alias: one, name: one}), name) == one
            assert getattr(plain(**{alias: one}), alias) is None  # so that a copy of the config may change `name`
            with pytest.raises(ValueError, match="two names for one setting") as error:
                plain(**{alias: one, name: other})
            assert f"`{alias}={one}`" in str(error.value) and f"`{name}={other}`" in str(error.value)


def test_rloo_names_of_the_rollout_size_set_num_mini_batches(tmp_path):
    sizes = {"num_mini_batches": 1, "gradient_accumulation_steps": 2}
    assert config(tmp_path, **sizes, steps_per_generation=6).num_mini_batches == 3
    assert config(tmp_path, **sizes, generation_batch_size=4 * 6).num_mini_batches == 3
    for alias in ({"steps_per_generation": 6}, {"generation_batch_size": 4 * 6}):
        with pytest.raises(
            ValueError, match=r"`steps_per_generation=6` .*2 × 2. Leave the first two out, and set `num_mini_batches`"
        ):
            config(tmp_path, **{**sizes, "num_mini_batches": 2}, **alias)
    with pytest.raises(ValueError, match="`steps_per_generation=3`"):  # not a whole number of minibatches
        config(tmp_path, **sizes, steps_per_generation=3)


def test_copies_of_a_config_are_equal_and_may_change(tmp_path):
    original = config(
        tmp_path,
        beta=0.1,
        epsilon=0.3,
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


def test_batch_arithmetic(subtests, tmp_path):
    for per_device, accumulation, mini_batches, epochs, episodes, steps in [
        (4, 1, 1, 1, 12, 3),
        (4, 1, 2, 2, 16, 8),  # two rollouts of 8 episodes, 2 minibatches, passed over twice
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
            assert args.mini_batch_size == args.local_mini_batch_size == per_device * accumulation
            assert args.batch_size == args.local_batch_size == per_device * accumulation * mini_batches
            assert args.generation_batch_size == args.batch_size  # what TRL generates at a time
            assert args.steps_per_generation == accumulation * mini_batches
            assert args.max_steps == steps == math.ceil(episodes / args.batch_size) * mini_batches * epochs


def test_grpos_name_of_the_score_chooses_the_best_model(tmp_path):
    for name in ("reward", "eval_reward"):
        args = config(tmp_path, metric_for_best_model=name)
        assert (args.metric_for_best_model, args.greater_is_better) == ("eval_objective/scores", True)


def test_total_episodes_and_max_steps_must_agree(tmp_path):
    assert config(tmp_path, total_episodes=16, max_steps=8).max_steps == 8
    with pytest.raises(ValueError, match=r"`total_episodes=16` makes 8 optimizer steps .* `max_steps=9`"):
        config(tmp_path, total_episodes=16, max_steps=9)


def test_a_rollout_holds_whole_groups(tmp_path):
    with pytest.raises(ValueError, match=r"\(8\) must be divisible by num_generations \(3\)"):
        config(tmp_path, num_generations=3)


RANGES = [
    ("max_tool_calling_iterations", [0], [1, None]),
    ("tool_timeout", [0.0, -1.0], [0.5, None]),
    ("adam_epsilon", [0.0], [1e-12]),
    ("baseline", ["none"], ["critic", "gated", "mean"]),
    ("cliprange", [0.0, -0.1], [1e-3]),
    ("cliprange_value", [0.0], [1e-3, None]),
    ("critic_learning_rate", [-1e-6], [0.0, None]),
    ("critic_warmup_rollouts", [-1], [0]),
    ("dual_clip", [1.0, 0.5], [1.01, None]),
    ("entropy_coef", [-0.1], [0.0]),
    ("epsilon_high", [0.0], [0.28, None]),
    ("gamma", [-0.1, 1.01, math.nan], [0.0, 1.0]),
    ("importance_sampling_clip_max", [0.99, math.nan], [1.0, None]),
    ("importance_sampling_clip_min", [-0.1, 1.01, math.nan], [0.0, 1.0]),
    ("importance_sampling_mode", ["truncate"], ["token_mask", "sequence_truncate"]),
    ("kl_coef", [-0.1, math.inf, math.nan], [0.0]),
    ("kl_coef_max", [-0.1], [0.1, None]),
    ("kl_coef_min", [-0.1], [0.0]),
    ("kl_horizon", [0], [1]),
    ("kl_target", [0.0], [0.1]),
    ("lam", [-0.1, 1.01], [0.0, 1.0]),
    *((name, [0.0, -1.0, math.inf], [0.05, 1.5, None]) for name in LAM_SCHEDULES),
    ("lam_value", [-0.1, 1.01], [0.0, 1.0, None]),
    ("local_rollout_forward_batch_size", [0], [1]),
    ("logits_budget_gb", [-1.0], [0.0, 0.5]),
    ("max_approx_kl", [0.0], [0.01, None]),
    ("max_completion_length", [0, None], [1]),
    ("missing_eos_penalty", [0.0, -1.0], [1.0, None]),
    ("num_generations", [0], [1]),
    ("num_mini_batches", [0], [1]),
    ("num_ppo_epochs", [0], [1]),
    ("gradient_accumulation_steps", [0], [1]),
    ("per_device_train_batch_size", [0], [1]),
    ("per_device_eval_batch_size", [0], [1]),
    ("ratio_band", [[0.7], [1.0, 2.0], [0.5, 1.0], [-0.1, 2.0], [0.5, math.inf]], [[0.7, 6.0], [0, 2], None]),
    ("reward_weights", [[math.nan], ["a"], [0, 0.0]], [[1, -0.5], [0, 2], None]),
    ("rollouts_ahead", [-1, 2], [0]),
    ("temperature", [0.0], [0.1]),
    ("total_episodes", [0], [1, None]),
    ("vf_coef", [-0.1], [0.0]),
    ("kl_estimator", ["k4"], ["k1", "k2", "k3"]),
    ("kl_controller", ["pid"], ["fixed", "adaptive"]),
    ("reward_normalization", ["std"], ["none", "running", "batch", "reference"]),
]


def test_ranges(subtests, tmp_path):
    ruled = {each.name for each in dataclasses.fields(PPOConfig) if rules_of(each)[0]}
    assert {name for name, _, _ in RANGES} >= ruled | INHERITED_RANGES.keys()  # every rule is tried
    adaptive = ("kl_target", "kl_horizon", "kl_coef_min", "kl_coef_max")
    for name, bad, good in RANGES:
        needed = {"kl_controller": "adaptive"} if name in adaptive else {}
        if name.startswith("importance_sampling_clip"):
            needed = {"importance_sampling_mode": "token_mask", "importance_sampling_clip_min": 0.5}
        with subtests.test(name=name):
            for value in bad:
                with pytest.raises(ValueError, match=rf"`{name}` must be .* got {re.escape(repr(value))}"):
                    config(tmp_path, **needed | {name: value})
            for value in good:
                assert getattr(config(tmp_path, **needed | {name: value}), name) == value


def test_a_setting_of_a_mode_that_is_off_raises(subtests, tmp_path):
    for name, value, setting, *given in [
        ("kl_target", 3.0, "kl_controller='adaptive'"),
        ("kl_horizon", 300, "kl_controller='adaptive'"),
        ("cliprange", 0.3, "ratio_band=None", {"ratio_band": [0.7, 6.0]}),
        ("epsilon_high", 0.3, "ratio_band=None", {"ratio_band": [0.7, 6.0]}),
        ("dual_clip", 3.0, "ratio_band=None", {"ratio_band": [0.7, 6.0]}),
        ("lam", 0.9, "lam_alpha=None", {"lam_alpha": 1.5}),
        ("reward_group_column", "topic", "reward_normalization='group'"),
        ("reward_reference_column", "answer", "reward_normalization='reference'"),
    ]:
        with subtests.test(name=name), pytest.raises(ValueError, match=f"`{name}={value}` needs `{setting}`"):
            config(tmp_path, **{name: value}, **dict(*given))


def test_contradictions(subtests, tmp_path):
    for kwargs, message in [
        ({"kl_controller": "adaptive", "kl_coef": 0.0}, "cannot change `kl_coef=0`"),
        ({"kl_controller": "adaptive", "beta": 0.0}, "cannot change `kl_coef=0`"),
        (
            {"kl_controller": "adaptive", "kl_coef": 0.1, "kl_coef_min": 0.2},
            r"`kl_coef=0.1` must lie within .*\[0.2, ",
        ),
        ({"kl_controller": "adaptive", "kl_coef": 0.1, "kl_coef_max": 0.05}, r"`kl_coef=0.1` must lie within"),
        ({"use_ref_model": False}, "`use_ref_model=False` loads no reference, .* got 0.05 and False"),
        ({"use_ref_model": False, "kl_coef": 0, "sync_ref_model": True}, "`sync_ref_model=True` need one"),
        ({"reward_normalization": "group"}, "needs `reward_group_column`"),
        (
            {"missing_eos_score": -1.0, "missing_eos_penalty": 1.0},
            "`missing_eos_score=-1.0` .*`missing_eos_penalty=1.0`",
        ),
        ({"mask_truncated_completions": True, "missing_eos_score": -1.0}, "leaves out responses without EOS"),
        ({"reward_clip_range": [1.0, -1.0]}, r"`reward_clip_range` must be \(min, max\) with min < max"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
    ]:
        with subtests.test(kwargs=kwargs), pytest.raises(ValueError, match=message):
            config(tmp_path, **kwargs)


def test_a_sampler_that_is_not_the_policy_is_corrected_for_or_needs_permission(subtests, tmp_path):
    for kwargs in [
        {"top_k": 50},
        {"top_p": 0.9},
        {"min_p": 0.05},
        {"repetition_penalty": 1.2},
        {"generation_kwargs": {"typical_p": 0.9}},
        {"generation_kwargs": {"temperature": 0.5}},
        {"generation_kwargs": '{"top_k": 50}'},  # as the command line passes it
    ]:
        with subtests.test(kwargs=kwargs):
            assert config(tmp_path, **kwargs).importance_correction == "token_truncate"
            assert config(tmp_path, **kwargs, old_logprobs="sampler").importance_correction == "none"
            uncorrected = {**kwargs, "importance_sampling_mode": "none"}
            with pytest.raises(ValueError, match="allow_off_policy_sampling=True") as error:
                config(tmp_path, **uncorrected)
            name, value = next(iter(kwargs.items()))
            assert str(value if name != "generation_kwargs" else next(iter(dict_of(value)))) in str(error.value)
            assert config(tmp_path, **uncorrected, allow_off_policy_sampling=True).importance_correction == "none"


def test_who_is_corrected_for(subtests, tmp_path):
    greedy = {"generation_kwargs": {"do_sample": False}, "allow_off_policy_sampling": True}
    for expected, kwargs in [
        ("none", {}),
        ("none", {"old_logprobs": "sampler"}),
        ("token_truncate", {"use_vllm": True}),
        ("token_truncate", {"allow_off_policy_sampling": True}),
        ("none", {"allow_off_policy_sampling": True, "old_logprobs": "sampler"}),
        ("sequence_mask", {"importance_sampling_mode": "sequence_mask"}),
        ("none", {**greedy, "importance_sampling_mode": "none"}),
        ("token_mask", {"importance_sampling_mode": "token_mask", "importance_sampling_clip_max": None,
                        "importance_sampling_clip_min": 0.5}),
    ]:  # fmt: skip
        with subtests.test(kwargs=kwargs):
            assert config(tmp_path, **kwargs).importance_correction == expected
    bounds = {"importance_sampling_clip_min": 1.0, "importance_sampling_clip_max": 1.0}
    for kwargs, message in [
        (
            {"importance_sampling_clip_max": 2.0},
            "bound importance weights, but `importance_sampling_mode='auto'` uses none",
        ),
        (
            {"importance_sampling_clip_min": 0.5},
            "bound importance weights, but `importance_sampling_mode='auto'` uses none",
        ),
        ({"top_k": 5, "importance_sampling_clip_max": None}, "needs a bound"),
        ({"top_k": 5, **bounds}, "`importance_sampling_clip_min=1.0` must be below `importance_sampling_clip_max=1.0"),
        ({"old_logprobs": "sampler", "importance_sampling_mode": "token_mask"}, "'token_mask'` has no effect"),
        (greedy, "`generation_kwargs={'do_sample': False}` decodes greedily"),
        ({**greedy, "old_logprobs": "sampler"}, "`generation_kwargs={'do_sample': False}` decodes greedily"),
    ]:
        with subtests.test(kwargs=kwargs), pytest.raises(ValueError, match=message):
            config(tmp_path, **kwargs)


@pytest.mark.slow
def test_a_generation_kwarg_acts_in_the_rollout_or_is_refused(subtests, tmp_path):
    def rollout(**kwargs):
        off_policy = {"allow_off_policy_sampling": True, "importance_sampling_mode": "none"}
        args = tiny_config(tmp_path, max_steps=1, generation_kwargs=kwargs, **off_policy)
        arguments = {"train_dataset": prompts(), "processing_class": tiny_tokenizer()}
        trainer = PPOTrainer(tiny_llama(), length_reward, args, **arguments)
        torch.manual_seed(0)
        trainer.train()
        return [batch["completion_ids"].tolist() for batch in trainer._buffered_inputs]

    plain, values = rollout(), HOSTILE | {"do_sample": False, "forced_eos_token_id": 9, "remove_invalid_values": True}
    assert HOSTILE.keys() >= OFF_POLICY_GENERATION_KWARGS | ON_POLICY_GENERATION_KWARGS
    for name, value in values.items():
        with subtests.test(name=name):
            if name in ON_POLICY_GENERATION_KWARGS:
                config(tmp_path, generation_kwargs={name: value})
            elif name in {"remove_invalid_values", "renormalize_logits"}:  # act beside others of them
                rollout(**{name: value})
            elif name in OFF_POLICY_GENERATION_KWARGS:
                assert rollout(**{name: value}) != plain
            else:
                with pytest.raises(ValueError, match=f"`generation_kwargs={{'{name}': .* is not supported: "):
                    rollout(**{name: value})


def test_what_generation_kwargs_cannot_do_is_named_with_what_can(subtests, tmp_path):
    for name, value, message in [
        ("stop_strings", ["."], "a response ends where the policy generates an EOS.*set `stop_token_id`"),
        ("stop", ["."], "set `stop_token_id`"),
        ("stop_token_ids", [9], "set `stop_token_id`"),
        ("max_new_tokens", 9, "set `max_completion_length`"),
        ("num_return_sequences", 2, "set `num_generations`"),
        ("seed", 1, "only vLLM reads it"),
        ("logprobs", 5, "only the log-prob of each sampled token is kept"),
        ("typical", 0.5, r"would do nothing in a rollout, or break it; did you mean typical_p\?"),
    ]:
        with subtests.test(name=name), pytest.raises(ValueError, match=message):
            config(tmp_path, generation_kwargs={name: value}, allow_off_policy_sampling=True)


def dict_of(value):
    return json.loads(value) if isinstance(value, str) else value


def test_neutral_sampling_is_allowed(tmp_path):
    assert config(tmp_path, top_k=None).top_k == 0  # transformers would make 50 of None
    kwargs = '{"use_cache": true}'
    config(tmp_path, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, temperature=0.7, generation_kwargs=kwargs)


def test_defaults():
    """TRL 1.12's for PPO's own fields, the N+ paper's epsilon, and RLOO's for what all on-policy trainers share."""
    args = PPOConfig("unused", use_cpu=True, bf16=False)
    trl_112 = {
        "learning_rate": 3e-6,
        "num_mini_batches": 1,
        "total_episodes": None,
        "local_rollout_forward_batch_size": 64,
        "stop_token_id": None,
        "missing_eos_penalty": None,
        "num_ppo_epochs": 4,
        "whiten_rewards": False,
        "kl_coef": 0.05,
        "kl_estimator": "k1",
        "clip_range": 0.2,
        "vf_coef": 0.1,
        "cliprange_value": 0.2,
        "gamma": 1.0,
        "ds3_gather_for_generation": True,
        "push_to_hub": False,
    }
    ours = {
        "lam": None,  # 0.95 in TRL 1.12
        "adam_epsilon": 1e-5,
        "disable_dropout": True,
        "num_generations": 1,
        "normalize_advantages": True,
        "kl_target": 6.0,
        "kl_horizon": 10000,
    }
    assert {name: getattr(args, name) for name in trl_112 | ours} == trl_112 | ours
    shared = RLOOConfig("unused", use_cpu=True, bf16=False)
    for name in ("temperature", "max_completion_length", "reward_clip_range", "max_grad_norm", "top_k", "top_p"):
        assert getattr(args, name) == getattr(shared, name)


def test_an_unset_clip_range_is_wide_only_without_a_kl_penalty_and_an_upper_side(tmp_path):
    assert config(tmp_path, kl_coef=0.05).clip_range == 0.2
    assert config(tmp_path, kl_coef=0.0).clip_range == config(tmp_path, beta=0.0).clip_range == 0.4
    assert config(tmp_path, kl_coef=0.0, epsilon_high=0.28).clip_range == 0.2
    assert config(tmp_path, kl_coef=0.0, cliprange=0.3).clip_range == config(tmp_path, epsilon=0.3).clip_range == 0.3
    trainer = PPOTrainer(
        tiny_llama(),
        length_reward,
        config(tmp_path, kl_coef=0.0),
        train_dataset=prompts(),
        processing_class=tiny_tokenizer(),
    )
    assert (trainer.epsilon_low, trainer.epsilon_high) == (0.4, 0.4)


def test_best_model_defaults_to_the_score(tmp_path):
    args = config(
        tmp_path,
        load_best_model_at_end=True,
        eval_strategy="steps",
        save_strategy="steps",
        save_steps=2,
        eval_steps=2,
    )
    assert (args.metric_for_best_model, args.greater_is_better) == ("eval_objective/scores", True)
    args = config(tmp_path, save_strategy="best", eval_strategy="steps", eval_steps=2)
    assert (args.metric_for_best_model, args.greater_is_better) == ("eval_objective/scores", True)
    args = config(tmp_path, save_strategy="best", metric_for_best_model="kl", eval_strategy="steps", eval_steps=2)
    assert args.metric_for_best_model == "kl"
