"""Read how an accelerate configuration spreads a run over processes."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from accelerate.commands.config.config_args import load_config_from_file

from .keys import check_accelerate_keys, check_deepspeed_keys


@dataclass(frozen=True)
class Layout:
    """
    Describe which part of a model each process keeps.

    Args:
        mode: what spreads the run: `"single"` (nothing), `"ddp"`, `"fsdp2"`, `"zero1"`, `"zero2"` or `"zero3"`.
        processes, machines: number of processes on all machines together, and number of machines.
        offloads_weights, offloads_optimizer: whether the weights, and whether the optimizer's state, are in the
            machine's memory instead of the GPU's.
        live_parameters: ZeRO-3's `stage3_max_live_parameters`, the most weights that a GPU gathers at once.
        checkpoints_activations: whether FSDP's own activation checkpointing is on.
        accumulation: number of gradient accumulation steps that the file sets; None if it sets none.
    """

    mode: str = "single"
    processes: int = 1
    machines: int = 1
    offloads_weights: bool = False
    offloads_optimizer: bool = False
    live_parameters: int = 10**9
    checkpoints_activations: bool = False
    accumulation: int | None = None

    @property
    def is_deepspeed(self) -> bool:
        """Return whether DeepSpeed shards the run."""
        return self.mode.startswith("zero")

    @property
    def shards_weights(self) -> bool:
        """Return whether each process keeps only its part of the weights."""
        return self.mode in ("fsdp2", "zero3")

    @property
    def shards_gradients(self) -> bool:
        """Return whether each process keeps only its part of the gradients."""
        return self.mode in ("fsdp2", "zero2", "zero3")

    @classmethod
    def read(cls, path: str | Path) -> "Layout":
        """
        Read the layout from an accelerate YAML.

        Raises:
            ValueError: accelerate does not understand the file, a key is misspelled, or runs do not work in its mode.
        """
        try:
            check_accelerate_keys(yaml.safe_load(Path(path).read_text()))
            config = load_config_from_file(str(path))
        except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
            raise ValueError(f"{path} is not an accelerate configuration: {' '.join(str(error).split())}") from error
        kind = str(getattr(config.distributed_type, "value", config.distributed_type))
        count: dict[str, Any] = {"processes": max(config.num_processes, 1), "machines": max(config.num_machines, 1)}
        if kind == "NO":
            return cls()
        if kind.startswith("MULTI_"):
            return cls("ddp" if count["processes"] > 1 else "single", **count)
        if kind == "FSDP":
            settings = config.fsdp_config
            if int(settings.get("fsdp_version", 1)) != 2:
                raise ValueError(f"{path} asks for FSDP1, whose LoRA adapters PEFT does not save: set fsdp_version: 2")
            offload = bool(settings.get("fsdp_offload_params"))
            return cls(
                "fsdp2",
                **count,
                offloads_weights=offload,
                offloads_optimizer=offload,
                checkpoints_activations=bool(settings.get("fsdp_activation_checkpointing")),
            )
        if kind == "DEEPSPEED":
            return cls._read_deepspeed(config.deepspeed_config, Path(path), count)
        raise ValueError(f"{path} has distributed_type {kind}: use NO, MULTI_GPU, FSDP or DEEPSPEED")

    @classmethod
    def _read_deepspeed(cls, config: dict, path: Path, count: dict[str, Any]) -> "Layout":
        stage, accumulation, zero = config.get("zero_stage", 2), config.get("gradient_accumulation_steps"), {}
        offload = [config.get(f"offload_{x}_device") for x in ("param", "optimizer")]
        if file := config.get("deepspeed_config_file"):
            found = [place for place in (Path(file), path.parent / file, path.parent.parent / file) if place.is_file()]
            if not found:
                raise ValueError(f"{path} names deepspeed_config_file {file}, which does not exist: correct the path")
            try:
                settings = json.loads(found[0].read_text())
                check_deepspeed_keys(settings)
            except ValueError as error:
                raise ValueError(f"{found[0]} is not a DeepSpeed configuration: {error}") from error
            zero = settings.get("zero_optimization", {})
            stage, accumulation = zero.get("stage", 0), settings.get("gradient_accumulation_steps")
            offload = [zero.get(f"offload_{x}", {}).get("device") for x in ("param", "optimizer")]
        if stage not in (1, 2, 3):
            raise ValueError(f"{path} asks for ZeRO stage {stage}: use 1, 2 or 3")
        live = zero.get("stage3_max_live_parameters", 10**9)
        return cls(
            f"zero{stage}",
            **count,
            offloads_weights=offload[0] in ("cpu", "nvme"),
            offloads_optimizer=offload[1] in ("cpu", "nvme"),
            live_parameters=10**9 if live == "auto" else int(live),
            accumulation=accumulation if isinstance(accumulation, int) else None,
        )
