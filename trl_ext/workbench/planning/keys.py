"""Find misspelled keys in accelerate's and DeepSpeed's files, which mostly ignore them silently."""

from dataclasses import fields
from typing import Any

from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser

from ...runs import did_you_mean

_OLD = {"dynamo_backend", "fp16"}  # top-level keys that accelerate still takes
# Sections whose keys become options of `accelerate launch`, and how these options begin
_SECTIONS = {
    "fsdp_config": ("fsdp_",),
    "deepspeed_config": ("deepspeed_", "zero", "offload_", "gradient_"),
    "dynamo_config": ("dynamo_",),
    "parallelism_config": ("parallelism_config_",),
}
# DeepSpeed's settings at the top level: not all of them, and later versions have more, so only a key that is nearly
# one of them is refused. (DeepSpeed itself refuses unknown keys in `zero_optimization`.)
_DEEPSPEED = (
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping bf16 fp16 amp "
    "torch_autocast data_types communication_data_type zero_optimization zero_allow_untested_optimizer "
    "zero_force_ds_cpu_optimizer optimizer scheduler prescale_gradients gradient_predivide_factor steps_per_print "
    "wall_clock_breakdown memory_breakdown dump_state activation_checkpointing aio flops_profiler comms_logger "
    "tensorboard wandb csv_monitor checkpoint compile dataloader_drop_last tensor_parallel elasticity autotuning"
).split()


def check_accelerate_keys(config: Any) -> None:
    """
    Check the keys of an accelerate YAML, and of its sections that say how a model is spread.

    Raises:
        ValueError: accelerate does not read a key, or `config` is no dictionary. The message names the nearest key
            that accelerate reads.
    """
    if not isinstance(config, dict):
        raise ValueError(f"it must hold keys and values, got {type(config).__name__}")
    top = {field.name for field in fields(ClusterConfig)}
    for key in config:
        if key not in top | _OLD:
            raise ValueError(f"it has the key {key}, which accelerate does not know{did_you_mean(key, top)}")
    options = set(vars(launch_command_parser().parse_args(["script"])))
    for section, begins in _SECTIONS.items():
        for key in config.get(section) or {}:
            # accelerate adds the prefix to keys of these two sections
            lacks_prefix = section in ("fsdp_config", "dynamo_config") and not key.startswith(begins)
            option = begins[0] + key if lacks_prefix else key
            if option not in options:
                nearest = did_you_mean(option, (name for name in options if name.startswith(begins)))
                raise ValueError(f"it has the key {key} in {section}, which accelerate ignores{nearest}")


def check_deepspeed_keys(settings: Any) -> None:
    """
    Check the top-level keys of a DeepSpeed file.

    Raises:
        ValueError: a key is nearly, but not exactly, the name of a setting, which the message names; or `settings` is
            no dictionary.
    """
    if not isinstance(settings, dict):
        raise ValueError(f"it must hold keys and values, got {type(settings).__name__}")
    for key in settings:
        if key not in _DEEPSPEED and (nearest := did_you_mean(key, _DEEPSPEED)):
            raise ValueError(f"it has the key {key}, which is not a setting of DeepSpeed{nearest}")
