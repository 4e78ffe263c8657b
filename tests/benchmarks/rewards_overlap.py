"""
What it saves that scoring elsewhere goes on during PPO's own passes: seconds a rollout, in a Markdown table.

    python tests/benchmarks/rewards_overlap.py

A reward stands for a server: it sleeps as long as the policy's and the reference's passes over a rollout take, which
is measured first. It is called in the foreground, and in the background.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from tests.tiny import prompts, tiny_config, tiny_llama, tiny_tokenizer
from trl_ext import PPOTrainer

ROLLOUTS = 5
MODEL = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4}


class Server:
    """Scores after `seconds`, in which this process has nothing to do."""

    __name__ = "server"

    def __init__(self, seconds: float, in_background: bool):
        self.seconds, self.in_background = seconds, in_background

    def __call__(self, completions, **kwargs):
        time.sleep(self.seconds)
        return [float(len(set(text.split()))) for text in completions]


def seconds_of(folder: str, reward: Server) -> dict[str, float]:
    """Median seconds of a rollout, from its prompts to its advantages, and of its phases."""
    config = {"max_completion_length": 48, "per_device_train_batch_size": 16, "num_ppo_epochs": 1, "logging_steps": 2}
    config |= {"old_logprobs": "recompute", "max_steps": 2 * ROLLOUTS, "learning_rate": 1e-5}
    trainer = PPOTrainer(
        model=tiny_llama(**MODEL, initializer_range=0.02),
        reward_funcs=reward,
        args=tiny_config(folder, **config),
        train_dataset=prompts(64),
        processing_class=tiny_tokenizer(),
    )
    collect, rollouts = trainer._generate_and_score_completions, []

    def timed(inputs):
        began = time.perf_counter()
        rows = collect(inputs)
        rollouts.append(time.perf_counter() - began)
        return rows

    trainer._generate_and_score_completions = timed
    trainer.train()
    logs = [log for log in trainer.state.log_history if "time/logprobs" in log][1:]  # the first one warms up
    phases = ("time/generate", "time/logprobs", "time/score", "time/score_wait")
    return {"rollout": statistics.median(rollouts[1:])} | {
        phase: statistics.median(log.get(phase, 0.0) for log in logs) for phase in phases
    }


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        passes = seconds_of(folder, Server(0.0, in_background=False))["time/logprobs"]
        print(f"Passes take {passes:.2f} s a rollout of 32 answers; so does the reward.\n")
        print("| reward | s a rollout | generation | passes | scoring | waiting |")
        print("|---|---|---|---|---|---|")
        for in_background in (False, True):
            times = seconds_of(folder, Server(passes, in_background))
            name = "in the background" if in_background else "in the foreground"
            print(f"| {name} | " + " | ".join(f"{seconds:.2f}" for seconds in times.values()) + " |")


if __name__ == "__main__":
    main()
