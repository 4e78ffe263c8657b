"""QLoRA on a CPU: the trained weights do not depend on evaluations in between, for layers of any size."""

import pytest
import torch
from peft import LoraConfig
from transformers import BitsAndBytesConfig

from tests.dpo.worker import config as dpo_config, pairs
from tests.tiny import length_reward, prompts, tiny_config, tiny_llama, tiny_tokenizer
from trl_ext import DPOTrainer, PPOTrainer

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("what", ["PPO", "DPO"])
@pytest.mark.parametrize("size", [48, 128])
def test_an_evaluation_changes_nothing(what, size, tmp_path):
    """On a CPU with AVX512-BF16 bitsandbytes packs weights in an evaluation, and packed weights pass no gradient."""
    model = str(tmp_path / "model")
    tiny_llama(hidden_size=size, intermediate_size=2 * size).save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    ends = []
    for strategy in ("no", "steps"):
        quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype="float32")
        arguments = {
            "model": model,
            "quantization_config": quantization,
            "peft_config": LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
        }
        settings = {"max_steps": 4, "eval_strategy": strategy, "eval_steps": 1, "per_device_eval_batch_size": 4}
        torch.manual_seed(0)
        if what == "PPO":
            data = {"train_dataset": prompts(), "eval_dataset": prompts(4)}
            trainer = PPOTrainer(
                reward_funcs=length_reward, args=tiny_config(tmp_path, **settings), **arguments, **data
            )
        else:
            data = {"train_dataset": pairs(), "eval_dataset": pairs(4)}
            trainer = DPOTrainer(args=dpo_config(tmp_path, **settings), **arguments, **data)
        trainer.train()
        trained = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if "lora_" in name}
        assert any(p.any() for name, p in trained.items() if "q_proj.lora_B.default" in name)
        ends.append(trained)
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=0)
