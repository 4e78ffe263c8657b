"""TRL's trainers that need nothing else, as runs that can be repeated."""

import trl
from trl import RewardTrainer, SFTTrainer

from .checkpoints import ResumableRun
from .redaction import HidesCredentials


class SFTConfig(HidesCredentials, trl.SFTConfig):
    """TRL's, which shows no credential to W&B, TensorBoard and the like."""


class RewardConfig(HidesCredentials, trl.RewardConfig):
    """TRL's, which shows no credential to W&B, TensorBoard and the like."""


class ResumableSFTTrainer(ResumableRun, SFTTrainer):
    """TRL's, which goes on only from a complete checkpoint of the same run."""


class ResumableRewardTrainer(ResumableRun, RewardTrainer):
    """TRL's, which goes on only from a complete checkpoint of the same run."""
