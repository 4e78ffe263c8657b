"""
What drawing a rollout while the one before is trained on hides of the shorter phase, in a Markdown table.

    OMP_NUM_THREADS=1 python tests/benchmarks/overlap.py

Generation is in a second process, with one thread each. Once both phases sleep, so that neither takes the core of the
other; once they are real, of a small model. Seconds are medians of rollouts, from start to start;
hidden is (serial − overlapped) / min(generation, training). Serial and overlapped runs alternate, `--repeats` times.
"""

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from transformers import LlamaForCausalLM, TrainerCallback

from tests.tiny import length_reward, prompts, tiny_config, tiny_llama, tiny_tokenizer
from trl_ext import PPOTrainer

MODEL = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "initializer_range": 0.02}
REAL = {"per_device_train_batch_size": 32, "max_completion_length": 56}  # a rollout of 64 answers


class SleepingLlama(LlamaForCausalLM):
    """Takes `config.seconds` longer to generate, and no core."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(self.config.seconds)
        return super().generate(*args, **kwargs)


class SleepingUpdates(TrainerCallback):
    """Takes so many seconds longer for an update, and no core."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(self.seconds)


def seconds_of(folder: str, ahead: int, model: Any, rollouts: int, update: float, **config: Any) -> dict[str, float]:
    """Median seconds of a rollout, of its generation, and of what it waits for; two minibatches, each passed once."""
    config = {"num_ppo_epochs": 1, "logging_steps": 2, "learning_rate": 1e-5, "max_steps": 2 * rollouts} | config
    trainer = PPOTrainer(
        model=model,
        reward_funcs=length_reward,
        args=tiny_config(folder, rollouts_ahead=ahead, old_logprobs="recompute", **config),
        train_dataset=prompts(256),
        processing_class=tiny_tokenizer(),
    )
    trainer.eos_token_ids = trainer.generation_config.eos_token_id = []  # all answers are of one length
    trainer.add_callback(SleepingUpdates(update))
    collect, began = trainer._generate_and_score_completions, []

    def timed(inputs: list) -> Any:
        began.append(time.perf_counter())
        return collect(inputs)

    trainer._generate_and_score_completions = timed
    trainer.train()
    periods = [after - before for before, after in zip(began[1:], began[2:], strict=False)]  # the first one warms up
    logs = [log for log in trainer.state.log_history if "time/update" in log][1:]
    phases = {"generate": "time/generate", "wait": "time/generate_wait"}
    return {"rollout": statistics.median(periods)} | {
        name: statistics.median(log.get(key, 0.0) for log in logs) for name, key in phases.items()
    }


def main() -> None:
    from tests.benchmarks.overlap import SleepingLlama as Importable  # by a name that the second process finds, too

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phases", nargs="+", choices=("sleep", "real"), default=["sleep", "real"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=2.0, help="that generation sleeps; an update, three eighths")
    args = parser.parse_args()
    torch.set_num_threads(1)

    def sleeping() -> Any:
        config = tiny_llama().config
        config.seconds = args.seconds
        return Importable(config)

    settings: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
        "sleep": (sleeping, {"update": 3 / 8 * args.seconds}),
        "real": (lambda: tiny_llama(**MODEL), {"update": 0.0, **REAL}),
    }
    print("| phases | s a rollout, serial | generation | training | overlapped | waiting | hidden |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name in args.phases:
        model, config = settings[name]
        for _ in range(args.repeats):
            with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
                serial, overlapped = (seconds_of(folder, k, model(), args.rollouts, **config) for k in (0, 1))
            generation = serial["generate"]
            training = serial["rollout"] - generation
            hidden = (serial["rollout"] - overlapped["rollout"]) / min(generation, training)
            seconds = (serial["rollout"], generation, training, overlapped["rollout"], overlapped["wait"])
            print(f"| {name} | " + " | ".join(f"{each:.2f}" for each in seconds) + f" | {hidden:.0%} |", flush=True)


if __name__ == "__main__":
    main()
