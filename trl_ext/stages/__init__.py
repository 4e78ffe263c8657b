"""The stages before PPO and DPO: SFT and reward models, by TRL's trainers, as runs that resume."""

from .trainers import ResumableRewardTrainer, ResumableSFTTrainer, RewardConfig, SFTConfig

__all__ = [
    "ResumableRewardTrainer",
    "ResumableSFTTrainer",
    "RewardConfig",
    "SFTConfig",
]
