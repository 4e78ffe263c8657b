"""Misspelled keys in accelerate's and DeepSpeed's files, most of which they pass over without a word."""

import difflib
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser

_OLD = {"dynamo_backend", "fp16"}  # top-level keys that accelerate still takes
# Sections whose keys become options of `accelerate launch`, and how these options begin
_SECTIONS = {
    "fsdp_config": ("fsdp_",),
    "deepspeed_config": ("deepspeed_", "zero", "offload_", "gradient_"),
    "dynamo_config": ("dynamo_",),
    "parallelism_config": ("parallelism_config_",),
}
# DeepSpeed's settings: not all of them, and later versions have more, so only what is nearly one of them is refused
_DEEPSPEED = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("bf16", "fp16", "amp", "torch_autocast", "data_types", "communication_data_type", "zero_optimization"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "optimizer", "scheduler"),
    *(
        "prescale_gradients",
        "gradient_predivide_factor",
        "steps_per_print",
        "wall_clock_breakdown",
        "memory_breakdown",
    ),
    *("dump_state", "activation_checkpointing", "aio", "flops_profiler", "comms_logger", "tensorboard", "wandb"),
    *("csv_monitor", "checkpoint", "compile", "dataloader_drop_last", "tensor_parallel", "elasticity", "autotuning"),
)
_ZERO = (
    *("stage", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "allgather_partitions"),
    *("allgather_bucket_size", "overlap_comm", "load_from_fp32_weights", "elastic_checkpoint", "offload_param"),
    *("offload_optimizer", "zenflow", "sub_group_size", "cpu_offload", "stage3_prefetch_bucket_size"),
    *("stage3_param_persistence_threshold", "stage3_model_persistence_threshold", "stage3_max_live_parameters"),
    *("stage3_max_reuse_distance", "stage3_gather_16bit_weights_on_model_save", "ignore_unused_parameters"),
    *("stage3_module_granularity_threshold", "stage3_use_all_reduce_for_fetch_params", "round_robin_gradients"),
    *("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights"),
    *("zero_quantized_gradients", "memory_efficient_linear", "pipeline_loading_checkpoint", "leaf_module"),
    *("override_module_apply", "log_trace_cache_warnings", "stage3_gather_fp16_weights_on_model_save"),
    *("cpu_offload_param", "cpu_offload_use_pin_memory", "stage3_allgather_sequential", "legacy_stage1"),
    *("compute_grad_norm", "use_multi_rank_bucket_allreduce", "enable_sanity_checks", "parameter_alignment"),
    *("save_muon_momentum_buffer_in_memory",),
)
_OFFLOAD = (
    *("device", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory", "pipeline_read"),
    *("pipeline_write", "fast_init", "ratio", "super_offload", "cpuadam_cores_perc"),
)


def _nearest(key: str, known: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(key, sorted(known), 1)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def check_accelerate_keys(config: Any) -> None:
    """
    Check the keys of an accelerate YAML, and of its sections that say how a model is spread.

    Raises:
        ValueError: one that accelerate does not read, with the nearest that it does.
    """
    if not isinstance(config, dict):
        raise ValueError(f"it must hold keys and values, got {type(config).__name__}")
    top = {field.name for field in fields(ClusterConfig)}
    for key in config:
        if key not in top | _OLD:
            raise ValueError(f"it has the key {key}, which accelerate does not know{_nearest(key, top)}")
    options = set(vars(launch_command_parser().parse_args(["script"])))
    for section, begins in _SECTIONS.items():
        for key in config.get(section) or {}:
            # accelerate adds the prefix in these two
            lacks_prefix = section in ("fsdp_config", "dynamo_config") and not key.startswith(begins)
            option = begins[0] + key if lacks_prefix else key
            if option not in options:
                nearest = _nearest(option, (name for name in options if name.startswith(begins)))
                raise ValueError(f"it has the key {key} in {section}, which accelerate passes over{nearest}")


def check_deepspeed_keys(settings: dict[str, Any]) -> None:
    """
    Check the keys of a DeepSpeed file, of its ZeRO section and of the offloading in it.

    Raises:
        ValueError: one that is nearly, but not, the name of a setting, with that name.
    """
    zero = settings.get("zero_optimization", {})
    sections = {"": (settings, _DEEPSPEED), " in zero_optimization": (zero, _ZERO)}
    for name in ("offload_param", "offload_optimizer"):
        sections[f" in {name}"] = (zero.get(name) or {}, _OFFLOAD)
    for where, (given, known) in sections.items():
        for key in given:
            # DeepSpeed takes those of stage 3 without their prefix, too
            if not {key, f"stage3_{key}"} & set(known) and (nearest := _nearest(key, known)):
                raise ValueError(f"it has the key {key}{where}, which is no setting of DeepSpeed{nearest}")
