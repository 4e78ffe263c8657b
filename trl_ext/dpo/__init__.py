"""Train on rows of a dataset: DPO, and TRL's SFT and reward trainers as runs that are recorded and resume exactly."""

from ..upstream import quiet

quiet()  # before the imports below: some libraries print remarks when they are imported

from ..models.centring import centre, centring_shift, head_of
from .config import DPOConfig
from .stages import ResumableRewardTrainer, ResumableSFTTrainer, RewardConfig, SFTConfig
from .trainer import DPOTrainer

__all__ = [
    "DPOConfig",
    "DPOTrainer",
    "ResumableRewardTrainer",
    "ResumableSFTTrainer",
    "RewardConfig",
    "SFTConfig",
    "centre",
    "centring_shift",
    "head_of",
]
