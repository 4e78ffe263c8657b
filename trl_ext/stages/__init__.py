"""Train SFT and reward models, the stages before PPO and DPO, with TRL's trainers, as runs that resume."""

from .trainers import ResumableRewardTrainer, ResumableSFTTrainer, RewardConfig, SFTConfig

__all__ = [
    "ResumableRewardTrainer",
    "ResumableSFTTrainer",
    "RewardConfig",
    "SFTConfig",
]
