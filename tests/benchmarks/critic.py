"""What a step of the critic alone costs beside one of both, and what a critic keeps that trains its MLPs alone.

    python tests/benchmarks/critic.py

Policy and critic are Llamas of hidden size 256, 4 layers and a vocabulary of 32,000, in float32 on one thread. Prints
the CPU-seconds of forward and backward in an optimizer step of 8 answers of 64 tokens to prompts of about 64, median
of `--rollouts`, and the bytes of the critic's gradients and of its moments.
"""

import argparse
import tempfile
import time
from statistics import median
from types import SimpleNamespace

import torch
from datasets import Dataset
from transformers import TrainerCallback

import trl_ext.ppo.metrics
from tests.tiny import tiny_config, tiny_llama, tiny_tokenizer
from trl_ext import PPOTrainer

SHAPE = {"vocab_size": 32_000, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4}
SHAPE |= {"max_position_embeddings": 256}


class Bytes(TrainerCallback):
    """What the gradients of the critic take, before a step."""

    gradients = 0

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients = sum(p.grad.nbytes for p in model.parameters_of("critic") if p.grad is not None)


def measured(critic_trains: str, rollouts: int, folder: str) -> dict[str, float]:
    config = {"per_device_train_batch_size": 8, "num_mini_batches": 1, "num_ppo_epochs": 1, "critic_steps": 2}
    config |= {"max_completion_length": 64, "max_steps": 2 * rollouts, "critic_trains": critic_trains}
    rows = Dataset.from_dict({"prompt": ["the cat sat on the mat and " * 9] * 64})
    trainer = PPOTrainer(
        model=tiny_llama(**SHAPE),
        reward_funcs=lambda completions, **kwargs: [float(len(text)) for text in completions],
        args=tiny_config(folder, **config),
        train_dataset=rows,
        processing_class=tiny_tokenizer(),
        callbacks=[seen := Bytes()],
    )
    trainer.train()
    seconds = [log["time/update"] for log in trainer.state.log_history if "time/update" in log]
    state = [v for p in trainer.model.parameters_of("critic") for v in trainer.optimizer.state[p].values()]
    return {
        "critic alone, s": median(seconds[0::2]),
        "both, s": median(seconds[1::2]),
        "gradients, bytes": seen.gradients,
        "moments, bytes": sum(value.nbytes for value in state if value.ndim),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    # Of the process, whatever else the machine does
    trl_ext.ppo.metrics.time = SimpleNamespace(perf_counter=time.process_time, time=time.time)
    for trains in ("all", "mlp"):
        with tempfile.TemporaryDirectory() as folder:
            print(
                trains, {name: round(value, 3) for name, value in measured(trains, options.rollouts, folder).items()}
            )
