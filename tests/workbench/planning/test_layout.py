"""What is read from an accelerate file."""

import json
from pathlib import Path

import pytest
import yaml

from trl_ext.workbench.planning import Layout

BASE = {
    "compute_environment": "LOCAL_MACHINE",
    "num_machines": 1,
    "num_processes": 8,
    "use_cpu": False,
    "debug": False,
}
FSDP2 = {"fsdp_version": 2, "fsdp_activation_checkpointing": True}
IN_FILE = {"deepspeed_config_file": "zero3.json"}
ZERO3 = {"stage": 3, "stage3_max_live_parameters": 7, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("given", "layout"),
    [
        ({"distributed_type": "NO"}, Layout("single")),
        ({"distributed_type": "MULTI_GPU"}, Layout("ddp", 8)),
        ({"distributed_type": "MULTI_GPU", "num_machines": 2, "num_processes": 16}, Layout("ddp", 16, 2)),
        ({"distributed_type": "FSDP", "fsdp_config": FSDP2}, Layout("fsdp2", 8, checkpoints_activations=True)),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2, "gradient_accumulation_steps": 4}},
            Layout("zero2", 8, accumulation=4),
        ),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": IN_FILE},
            Layout("zero3", 8, offloads_optimizer=True, live_parameters=7),
        ),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1}}, "under FSDP1, PEFT saves no adapters"),
        ({"distributed_type": "MULTI_GPU", "num_proceses": 8}, "num_proceses"),  # as accelerate writes them
    ],
)
def test_modes(given, layout, tmp_path):
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(BASE | given))
    (tmp_path / "zero3.json").write_text(
        json.dumps({"zero_optimization": ZERO3, "gradient_accumulation_steps": "auto"})
    )
    if isinstance(layout, Layout):
        assert Layout.read(tmp_path / "a.yaml") == layout
    else:
        with pytest.raises(ValueError, match=layout):
            Layout.read(tmp_path / "a.yaml")


def test_shipped_files_are_read_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in sorted((Path(__file__).parents[3] / "accelerate_configs").glob("*.yaml")):
        Layout.read(path)
