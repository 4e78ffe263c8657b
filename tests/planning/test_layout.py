import json

import pytest
import yaml

from trl_ext.planning import Layout

BASE = {
    "compute_environment": "LOCAL_MACHINE",
    "num_machines": 1,
    "num_processes": 8,
    "use_cpu": False,
    "debug": False,
}
ZERO3 = {"stage": 3, "stage3_max_live_parameters": 7, "offload_optimizer": {"device": "cpu"}}


def read(folder, **more):
    (folder / "a.yaml").write_text(yaml.safe_dump(BASE | more))
    return Layout.read(folder / "a.yaml")


def test_modes(tmp_path):
    assert read(tmp_path, distributed_type="NO") == Layout("single")
    assert read(tmp_path, distributed_type="MULTI_GPU") == Layout("ddp", 8)
    assert read(tmp_path, distributed_type="MULTI_GPU", num_machines=2, num_processes=16) == Layout("ddp", 16, 2)
    fsdp = {"fsdp_version": 2, "fsdp_activation_checkpointing": True}
    assert read(tmp_path, distributed_type="FSDP", fsdp_config=fsdp) == Layout(
        "fsdp2", 8, checkpoints_activations=True
    )
    plain = {"zero_stage": 2, "gradient_accumulation_steps": 4}
    assert read(tmp_path, distributed_type="DEEPSPEED", deepspeed_config=plain) == Layout("zero2", 8, accumulation=4)


def test_deepspeed_in_a_file_of_its_own(tmp_path):
    (tmp_path / "zero3.json").write_text(
        json.dumps({"zero_optimization": ZERO3, "gradient_accumulation_steps": "auto"})
    )
    layout = read(tmp_path, distributed_type="DEEPSPEED", deepspeed_config={"deepspeed_config_file": "zero3.json"})
    assert layout == Layout("zero3", 8, offloads_optimizer=True, live_parameters=7)
    assert layout.shards_weights and layout.shards_gradients and layout.is_deepspeed


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1}}, "asks for FSDP1, whose LoRA adapters"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 0}}, "asks for ZeRO stage 0"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "x.json"}}, "is not there"),
        ({"distributed_type": "MULTI_GPU", "num_proceses": 8}, "is no accelerate configuration.*num_proceses"),
        ({"distributed_type": "MEGATRON_LM"}, "has distributed_type MEGATRON_LM"),
    ],
)
def test_what_cannot_be_planned_says_why(tmp_path, more, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, **more)
