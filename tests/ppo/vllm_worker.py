"""Two processes with a vLLM server that only process 0 calls: a run to its end, and one whose server dies."""

import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig

from tests.launch import spare_time
from tests.ppo.test_vllm import after, make
from tests.ppo.vllm_stub import serving
from tests.tiny import tiny_llama, weights
from trl_ext.ppo import ServerLost

LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def main(folder):
    said = {}
    with pytest.MonkeyPatch.context() as patch, serving(tiny_llama(seed=5), patch) as server:
        config = {"per_device_train_batch_size": 2, "peft_config": LORA}
        trainer = make(folder / "stays", server, **config)
        trainer.train()
        said["stays"], said["processes"] = weights(trainer), trainer.accelerator.num_processes
        trainer = make(folder / "away", server, **config)
        server.during = after(2, "/v1/completions", server.stop)
        with pytest.raises(ServerLost) as raised:
            trainer.train()
        said["away"] = str(raised.value)
        torch.save(said, folder / f"process {trainer.args.process_index}.pt")


if __name__ == "__main__":
    spare_time()
    main(Path(sys.argv[1]))
