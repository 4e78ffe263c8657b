"""Generation from sharded weights."""

import inspect

from torch.distributed.fsdp import FSDPModule
from transformers import Trainer
from trl import GRPOTrainer

from tests.contract.observed import grpo, require


def test_sharded_weights_during_generation(tmp_path):
    reader = "Generation of PPOTrainer from sharded weights"
    trainer = grpo(tmp_path)
    require(trainer._dist.is_zero3 is False, "`_dist.is_zero3` is not whether ZeRO-3 is on", reader)
    generate = inspect.getsource(GRPOTrainer._generate_single_turn)
    require("self.args.ds3_gather_for_generation" in generate, "`_generate_single_turn` gathers unasked", reader)
    setter = inspect.getsource(FSDPModule.set_reshard_after_forward)
    for name in ("_get_fsdp_state()", "_fsdp_param_groups", "post_forward_mesh_info"):
        require(name in setter, f"FSDP2 keeps whether a layer reshards elsewhere than in `{name}`", reader)
    prepare = inspect.getsource(Trainer._prepare_for_training)
    require('register_fsdp_forward_method(self.model, "generate")' in prepare, "FSDP2 skips `generate`", reader)
