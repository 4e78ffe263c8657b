"""Sharded weights and accelerate."""

import inspect

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import Trainer
from trl import RLOOTrainer

from tests.contract.observed import require, rloo


def test_sharded_weights_during_generation(tmp_path):
    reader = "Generation of PPOTrainer from sharded weights"
    trainer = rloo(tmp_path)
    require(trainer._dist.is_zero3 is False, "`_dist.is_zero3` is not whether ZeRO-3 is on", reader)
    generate = inspect.getsource(RLOOTrainer._generate_single_turn)
    require("self.args.ds3_gather_for_generation" in generate, "`_generate_single_turn` gathers unasked", reader)
    setter = inspect.getsource(FSDPModule.set_reshard_after_forward)
    for name in ("_get_fsdp_state()", "_fsdp_param_groups", "post_forward_mesh_info"):
        require(name in setter, f"FSDP2 keeps whether a layer reshards elsewhere than in `{name}`", reader)
    prepare = inspect.getsource(Trainer._prepare_for_training)
    require('register_fsdp_forward_method(self.model, "generate")' in prepare, "FSDP2 skips `generate`", reader)


def test_accelerate_names(tmp_path):
    accelerator = rloo(tmp_path).accelerator
    reader = "PPOTrainer"
    rows = torch.arange(3.0)
    require(torch.equal(accelerator.gather(rows[None])[0], rows), "`gather` of one process changes it", reader)
    require(torch.equal(accelerator.reduce(rows, reduction="sum"), rows), "`reduce` changes it", reader)
    require(getattr(accelerator, "scaler", None) is None, "there is a gradient scaler without fp16", reader)
    for name in ("num_processes", "process_index", "distributed_type", "device", "is_main_process"):
        require(hasattr(accelerator, name), f"Accelerator has no `{name}`", reader)
