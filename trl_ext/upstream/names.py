"""
List every private name of other libraries that trl_ext uses: where it is, and which arguments are passed to it.

Import such a function or class from this module. If a new version of a library has changed it, an error says what
changed. TRL's classes that PPOTrainer and DPOTrainer inherit from are checked when such a trainer is built, by
[`check_contract`]. `python -m trl_ext.cli.contract` checks and shows every name; `pytest -m "" tests/contract` tests
what the names do.
"""

import functools
from importlib.metadata import version
from typing import Any

from .contract import attribute_changes, find, function_change, method_change, names_of_both

TESTED = {"trl": "1.16.0", "transformers": "5.23.0", "peft": "0.21.2", "accelerate": "1.15.0"}

NAMES: dict[str, dict[str, str | None]] = {  # module -> function or class -> what we pass, see `function_change`
    "accelerate.commands.launch": {"launch_command_parser": ""},
    "peft.tuners.tuners_utils": {"BaseTunerLayer": None},
    "peft.utils": {"AuxiliaryTrainingWrapper": None},
    "torch.distributed.elastic.multiprocessing.api": {"SignalException": None},
    "transformers.integrations": {"is_deepspeed_zero3_enabled": ""},
    "transformers.integrations.deepspeed": {"_hf_deepspeed_config_weak_ref": None},
    "transformers.modeling_utils": {"set_zero3_state": ""},
    "transformers.utils": {"find_adapter_config_file": "model_id"},
    "trl.cli.accelerate_config": {"resolve_accelerate_config_argument": "launch_args"},
    "trl.cli.accelerate_launcher": {
        "launch_training_script": "script_name, launch_args, training_script_args, launch_parser_fn=",
    },
    "trl.data_utils": {"is_conversational": "example"},
    "trl.kernels.chunked_logprob": {"_backward_tile": None, "_forward_tile": None},
    "trl.models": {
        "prepare_deepspeed": "model, accelerator",
        "prepare_fsdp": "model, accelerator",
        "unwrap_model_for_generation": "model, accelerator, gradient_checkpointing_kwargs=",
    },
    "trl.models.utils": {
        "add_hooks": "model",
        "disable_gradient_checkpointing": "model, gradient_checkpointing_kwargs",
        "remove_hooks": "model",
    },
    "trl.trainer.utils": {
        "FusedCausalLMOutput": "log_probs=, entropy=, aux_loss=",
        "RepeatSampler": "data_source=, mini_repeat_count=, batch_size=, repeat_count=, shuffle=, seed=",
        "add_fused_lm_head": "model, temperature=, outputs=",
        "create_model_from_path": "model_id",
        "disable_dropout_in_model": "model",
        "get_callable_name": "func",
        "get_config_model_id": "config",
        "is_async_callable": "func",
        "pad": "tensors, padding_value, padding_side, pad_to_multiple_of",
        "selective_log_softmax_and_entropy": "logits, index, temperature=",
    },
}

# A method of ours that overrides one of these takes exactly these parameters; with "..." it passes on all others
METHODS: dict[str, dict[str, str]] = {  # class -> method -> what we pass, see `method_change`
    "trl.GRPOTrainer": {
        "__init__": "model=, reward_funcs=, args=, train_dataset=, eval_dataset=, processing_class=, "
        "reward_processing_classes=, callbacks=, optimizers=, quantization_config=, peft_config=, tools=, "
        "rollout_func=, environment_factory=, ...",
        "_calculate_rewards": "inputs, prompts, completions, completion_ids_list",
        "_clip_grad_norm": "model",
        "_compute_loss": "model, inputs",
        "_finalize_training": "...",
        "_generate": "prompts",
        "_generate_and_score_completions": "inputs",
        "_generate_single_turn": "prompt_ids, images, multimodal_fields, ...",
        "_get_grad_norm": "model, grad_norm=",
        "_get_per_token_logps_and_entropies": "...",
        "_get_train_sampler": "dataset",
        "_load_best_model": "",
        "_load_from_checkpoint": "resume_from_checkpoint, model",
        "_load_optimizer_and_scheduler": "checkpoint",
        "_load_rng_state": "checkpoint",
        "_maybe_log_save_evaluate": "...",
        "_prepare_inputs": "generation_batch",
        "_push_from_checkpoint": "checkpoint_folder",
        "_save": "output_dir, state_dict=",
        "_save_checkpoint": "model, trial",
        "_save_optimizer_and_scheduler": "output_dir",
        "_save_rng_state": "output_dir",
        "_set_signature_columns_if_needed": "",
        "_tokenize_prompts": "prompts",
        "_tool_call_loop": "...",
        "create_optimizer": "model",
        "create_scheduler": "...",
        "evaluation_loop": "dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix",
        "log": "logs, start_time",
        "prediction_step": "model, inputs, prediction_loss_only, ignore_keys",
        "save_model": "output_dir, _internal_call=, ...",
        "train": "resume_from_checkpoint, ...",
        "training_step": "model, inputs, num_items_in_batch",
    },
    "trl.DPOTrainer": {
        "__init__": "model=, ref_model=, args=, data_collator=, train_dataset=, eval_dataset=, processing_class=, "
        "compute_metrics=, callbacks=, optimizers=, quantization_config=, peft_config=, ...",
        "_compute_loss": "model, inputs, return_outputs",
        "_finalize_training": "...",
        "_load_best_model": "",
        "_load_from_checkpoint": "resume_from_checkpoint, ...",
        "_load_optimizer_and_scheduler": "checkpoint",
        "_maybe_log_save_evaluate": "...",
        "_push_from_checkpoint": "checkpoint_folder",
        "_save": "output_dir, state_dict=",
        "_save_checkpoint": "model, trial",
        "_set_signature_columns_if_needed": "",
        "compute_loss": "model, inputs, ...",
        "compute_ref_log_probs": "model, inputs",
        "create_scheduler": "...",
        "evaluate": "eval_dataset, ...",
        "evaluation_loop": "dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix",
        "get_batch_samples": "...",
        "prediction_step": "model, inputs, prediction_loss_only, ignore_keys",
        "train": "resume_from_checkpoint, ...",
        "training_step": "...",
    },
    "trl.RewardTrainer": {  # the first three of SFTTrainer, too
        "get_batch_samples": "...",
        "evaluation_loop": "dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix",
        "prediction_step": "model, inputs, prediction_loss_only, ignore_keys",
        "_set_signature_columns_if_needed": "",
        "compute_loss": "model, inputs, return_outputs, num_items_in_batch",
    },
    "trl.generation.vllm_client.VLLMClient": {
        "generate": "...",
        "reset_prefix_cache": "",
        "update_named_params": "metadata, named_params",
    },
    "trl.generation.vllm_generation.VLLMGeneration": {
        "generate": "prompts=, images=, num_generations=, profiler=",
        "sync_weights": "",
    },
    "transformers.Trainer": {  # of `CriticTrainer`
        "_set_signature_columns_if_needed": "",
        "compute_loss": "model, inputs, return_outputs, num_items_in_batch",
        "evaluation_loop": "dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix=",
        "log": "logs, ...",
        "prediction_step": "model, inputs, prediction_loss_only, ignore_keys",
    },
    "transformers.GenerationMixin": {"_get_logits_processor": "generation_config, ..."},
    "transformers.PreTrainedModel": {"_set_gradient_checkpointing": "enable=, gradient_checkpointing_func=, ..."},
    "torch.distributed.fsdp.FSDPModule": {"_get_fsdp_state": ""},
}

ATTRIBUTES = {  # class -> attributes, of the class or set by its methods, that we read or set
    "trl.GRPOTrainer": """
        _async_tool_dicts _buffered_inputs _dist _environment_pool
        _globalstep_last_logged _last_loaded_step _logs _metrics _name _paper
        _signature_columns
        _step _sync_tool_dicts _tag_names _tokenizer _total_loss_scalar _tr_loss
        accelerator args aux_loss_enabled callback_handler chat_template_kwargs control
        environment_factories environments eos_token_ids epsilon_high
        epsilon_low eval_dataset generation_config generation_kwargs is_deepspeed_enabled is_fsdp_enabled
        loss_is_scaled_for_ga
        max_completion_length model model_wrapped num_generations num_generations_eval num_iterations optimizer
        place_model_on_device processing_class ref_model reward_func_names reward_funcs
        reward_processing_classes reward_weights router_aux_loss_coef state temperature tools train_dataset use_vllm
        vllm_generation vllm_importance_sampling_correction""",
    "trl.DPOTrainer": """
        _metrics _signature_columns _tag_names _tokenizer
        accelerator args beta control data_collator eval_dataset is_deepspeed_enabled is_fsdp_enabled ld_alpha
        loss_types loss_weights model precompute_ref_logps ref_model state train_dataset""",
    "trl.RewardTrainer": "_metrics _signature_columns accelerator data_collator model",
    "trl.generation.vllm_client.VLLMClient": "base_url session",
    "trl.generation.vllm_generation.VLLMGeneration": """
        _dist accelerator generation_kwargs logprobs model vllm_client""",
    "transformers.Trainer": "_signature_columns model_accepts_loss_kwargs",
    "transformers.TrainingArguments": "_VALID_DICT_FIELDS",
    "transformers.PreTrainedConfig": "_attn_implementation",
    "transformers.PreTrainedModel": "_no_split_modules",
    "bitsandbytes.nn.Linear4bit": "support_avx512bf16_for_cpu",
    "peft.tuners.tuners_utils.BaseTunerLayer": "_active_adapter active_adapters disable_adapters",
}

_MODULES = {name: module for module, names in NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULES[name]
    if change := function_change(f"{module}.{name}", NAMES[module][name]):
        raise ImportError(sentence([change]))
    return find(f"{module}.{name}")


@functools.cache
def check_contract(trainer: type) -> None:
    """
    Raise an `ImportError` if the TRL class that `trainer` inherits from has changed so that trl_ext would fail.

    Call this first in the trainer's constructor, before anything is loaded.
    """
    found = [*changes_of_class(f"trl.{_base(trainer).__name__}").values(), names_taken(trainer)]
    if changes := [change for change in found if change]:
        raise ImportError(sentence(changes))


def changes_of_class(path: str) -> dict[str, str]:
    """
    Map each method and attribute of a class that trl_ext uses to a sentence on what changed, "" if nothing did.

    `METHODS` and `ATTRIBUTES` list them. Keys are `path.name`. If the class itself is gone, the only key is `path`.
    """
    try:
        cls = find(path)
    except ImportError as error:
        return {path: str(error)}
    methods = {name: method_change(cls, name, passed) for name, passed in METHODS.get(path, {}).items()}
    changes = methods | attribute_changes(cls, ATTRIBUTES.get(path, "").split())
    return {f"{path}.{name}": change for name, change in changes.items()}


def names_taken(trainer: type) -> str:
    """
    Return a sentence with the names that TRL's trainer has and trl_ext's trainer defines by accident; "" if none.

    Names in `METHODS` and `ATTRIBUTES` are defined on purpose.
    """
    base = _base(trainer)
    before, theirs = trainer.__mro__[: trainer.__mro__.index(base)], base.__mro__[:-1]  # all but `object`
    path = f"trl.{base.__name__}"
    ours = [cls for cls in before if cls.__module__.startswith("trl_ext.")]
    taken = names_of_both(ours, theirs) - METHODS[path].keys() - {*ATTRIBUTES[path].split()}
    return f"`{base.__name__}` has {', '.join(sorted(taken))}, which {trainer.__name__} defines, too" if taken else ""


def _base(trainer: type) -> type:
    return next(cls for cls in trainer.__mro__ if cls.__module__.startswith("trl."))


def sentence(changes: list[str]) -> str:
    """Return an error message: the first three of the changes, the tested and installed versions, and what to do."""
    differ = [package for package, tested in TESTED.items() if version(package) != tested] or ["trl"]
    tested = " and ".join(f"{package} {TESTED[package]}" for package in differ)
    installed = " and ".join(f"{package} {version(package)}" for package in differ)
    more = f"; and {len(changes) - 3} more" if len(changes) > 3 else ""
    return (
        f"trl_ext was tested with {tested}. In the installed {installed}, {'; '.join(changes[:3])}{more}. Install the "
        "tested version, or a newer trl_ext (`python -m trl_ext.cli.contract` shows every item)."
    )
