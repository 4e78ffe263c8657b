# /// script
# requires-python = ">=3.11"
# dependencies = ["trl-ext"]
#
# [tool.uv.sources]
# trl-ext = {path = "..", editable = true}
# ///
"""Monitor TRL's GRPOTrainer: monitors are callbacks; a reward function with weight 0 measures the answers for them.

    uv run examples/grpo_with_monitors.py

Nothing else in the script changes. The page of the run is `outputs/grpo/report.html`.
"""

import argparse

import torch
from trl import GRPOConfig, GRPOTrainer

from trl_ext import load_dataset_split
from trl_ext.callbacks import (
    HackWatch,
    KLBudgetCallback,
    LengthDriftCallback,
    RepetitionCallback,
    RewardDriftCallback,
    record_run,
)
from trl_ext.rewards import repetition_watch, score_watch


def concise(completions, **kwargs):
    """Reward short answers, a goal that a policy soon exploits by empty answers."""
    texts = [answer if isinstance(answer, str) else answer[0]["content"] for answer in completions]
    return [-len(text) / 100 for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct")
    parser.add_argument("--dataset", default="trl-lib/ultrafeedback-prompt", help="with a column `prompt`")
    parser.add_argument("--output_dir", default="outputs/grpo")
    parser.add_argument("--max_steps", type=int, default=500)
    args = parser.parse_args()

    trainer = GRPOTrainer(
        model=args.model,
        reward_funcs=[score_watch(concise), repetition_watch],  # the second one has weight 0: it only measures
        args=GRPOConfig(
            args.output_dir,
            max_steps=args.max_steps,
            reward_weights=[1.0, 0.0],
            beta=0.04,  # without it GRPO logs no KL
            max_completion_length=64,
            bf16=torch.cuda.is_available(),
            logging_steps=1,
            report_to="none",
        ),
        train_dataset=load_dataset_split(args.dataset, "train"),
        callbacks=[
            KLBudgetCallback(limit=10, action="stop"),  # nats per completion
            RewardDriftCallback(),
            RepetitionCallback(),
            LengthDriftCallback(),
        ],
    )
    trainer.add_callback(HackWatch(trainer=trainer))  # says what the reward pays for
    record_run(trainer)
    trainer.train()


if __name__ == "__main__":
    main()
