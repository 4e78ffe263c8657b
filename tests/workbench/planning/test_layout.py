import json
from pathlib import Path

import pytest
import yaml

from trl_ext.workbench.planning import Layout

ROOT = Path(__file__).parents[3]

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


def test_what_cannot_be_planned_says_why(subtests, tmp_path):
    for more, message in [
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1}}, "asks for FSDP1, whose LoRA adapters"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 0}}, "asks for ZeRO stage 0"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "x.json"}}, "does not exist"),
        ({"distributed_type": "MULTI_GPU", "num_proceses": 8}, "is not an accelerate configuration.*num_proceses"),
        ({"distributed_type": "MEGATRON_LM"}, "has distributed_type MEGATRON_LM"),
    ]:
        with subtests.test(more=more), pytest.raises(ValueError, match=message):
            read(tmp_path, **more)


def misspelled(folder, name, right, wrong):
    """Copy a shipped file and the DeepSpeed file that it names to `folder`, with one key misspelled."""
    for path in (ROOT / "accelerate_configs").iterdir():
        (folder / path.name).write_text(path.read_text().replace("accelerate_configs/", ""))
    text = (folder / name).read_text()
    assert right in text
    (folder / name).write_text(text.replace(right, wrong))
    return folder / f"{Path(name).stem}.yaml"


def test_a_misspelled_key_is_refused_with_the_right_one(subtests, tmp_path):
    for name, right, wrong, section in [
        ("fsdp2.yaml", "num_processes", "num_proceses", ""),
        ("fsdp2.yaml", "fsdp_reshard_after_forward", "fsdp_reshard_after_foward", " in fsdp_config"),
        ("zero3.yaml", "zero3_init_flag", "zero3_init_flg", " in deepspeed_config"),
        ("zero3.json", "gradient_clipping", "gradient_cliping", ""),
    ]:
        with (
            subtests.test(wrong=wrong),
            pytest.raises(
                ValueError, match=f"{name} is not .* it has the key {wrong}{section}, .*; did you mean {right}"
            ),
        ):
            Layout.read(misspelled(tmp_path, name, right, wrong))


def test_a_key_that_may_be_right_is_read(subtests, tmp_path):
    for name, right, other in [
        ("fsdp2.yaml", "fsdp_reshard_after_forward", "reshard_after_forward"),  # accelerate adds the prefix
        ("zero3.json", "gradient_clipping", "a_setting_of_a_later_version"),
    ]:
        with subtests.test(other=other):
            assert Layout.read(misspelled(tmp_path, name, right, other)).processes == 8


def test_shipped_files_are_read_from_any_folder(subtests, tmp_path, monkeypatch):
    for path in sorted((ROOT / "accelerate_configs").glob("*.yaml")):
        with subtests.test(path=path):
            monkeypatch.chdir(tmp_path)
            Layout.read(path)


def test_a_broken_deepspeed_file_is_named(tmp_path):
    for wrong, message in (("{", "Expecting"), ("[1]", "got list")):
        with pytest.raises(ValueError, match=f"zero3.json is not a DeepSpeed configuration: .*{message}"):
            Layout.read(
                misspelled(tmp_path, "zero3.json", (ROOT / "accelerate_configs/zero3.json").read_text(), wrong)
            )
