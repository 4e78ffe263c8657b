"""No key in accelerate_configs/ is misspelled: accelerate ignores nested keys, DeepSpeed top-level ones."""

import dataclasses
import json
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.utils import FullyShardedDataParallelPlugin

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
LAUNCHER = {"deepspeed_config_file", "deepspeed_multinode_launcher", "zero3_init_flag"}
SETTINGS = {  # the Trainer fills them in, or DeepSpeed itself
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("bf16", "fp16", "zero_optimization"),
}


def fields(cls):
    return {field.name for field in dataclasses.fields(cls)}


def test_every_key_is_read(subtests):
    for path in FILES:
        with subtests.test(path=path):
            config = yaml.safe_load(path.read_text())
            load_config_from_file(str(path))
            assert set(config) <= fields(ClusterConfig)
            sharding = {key.removeprefix("fsdp_") for key in config.get("fsdp_config", {})}
            assert sharding <= fields(FullyShardedDataParallelPlugin) | {"version", "offload_params"}
            assert set(config.get("deepspeed_config", {})) <= LAUNCHER


@pytest.mark.optional
def test_every_deepspeed_setting_is_read(subtests):
    for path in sorted((ROOT / "accelerate_configs").glob("*.json")):
        with subtests.test(path=path):
            settings = json.loads(path.read_text())
            assert set(settings) == SETTINGS
            zero = pytest.importorskip("deepspeed.runtime.zero.config", reason="needs deepspeed")
            zero.DeepSpeedZeroConfig(**{k: v for k, v in settings["zero_optimization"].items() if v != "auto"})
            known = {name for name, field in zero.DeepSpeedZeroConfig.model_fields.items() if field.alias is None}
            known |= {field.alias for field in zero.DeepSpeedZeroConfig.model_fields.values()}
            assert set(settings["zero_optimization"]) <= known
            assert any(f"accelerate_configs/{path.name}" in file.read_text() for file in FILES)
