# /// script
# requires-python = ">=3.11"
# dependencies = ["trl-ext"]
#
# [tool.uv.sources]
# trl-ext = {path = "..", editable = true}
# ///
"""Train by PPO with LoRA on one GPU: policy and critic are adapters on one frozen base, which is also the reference.

    uv run examples/ppo_lora.py --reward_model REWARD_MODEL

REWARD_MODEL is a sequence classifier with one label, such as `trl-ext reward` trains.
"""

import argparse

from peft import LoraConfig

from trl_ext import PPOConfig, PPOTrainer, load_dataset_split
from trl_ext.callbacks import KLBudgetCallback, LengthDriftCallback, ValueHealthCallback


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct")
    parser.add_argument("--reward_model", required=True)
    parser.add_argument("--dataset", default="trl-lib/ultrafeedback-prompt", help="with a column `prompt`")
    parser.add_argument("--output_dir", default="outputs/ppo-lora")
    parser.add_argument("--total_episodes", type=int, default=10_000)
    parser.add_argument("--max_completion_length", type=int, default=256)
    args = parser.parse_args()

    trainer = PPOTrainer(
        model=args.model,
        reward_funcs=[args.reward_model],
        args=PPOConfig(
            args.output_dir,
            total_episodes=args.total_episodes,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=4,
            num_mini_batches=4,  # a rollout of 128 episodes
            max_completion_length=args.max_completion_length,
            learning_rate=1e-5,
            critic_learning_rate=5e-5,
            kl_controller="adaptive",
            kl_target=6.0,  # nats a completion
            kl_horizon=args.total_episodes // 5,
            save_steps=50,
            logging_steps=1,
            report_to="none",
        ),
        train_dataset=load_dataset_split(args.dataset, "train"),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        callbacks=[KLBudgetCallback(limit=20, action="stop"), LengthDriftCallback(), ValueHealthCallback()],
    )
    trainer.train()  # with `resume_from_checkpoint=True` it resumes where it stopped
    trainer.save_model()  # the policy's adapter; the critic's is in critic/


if __name__ == "__main__":
    main()
