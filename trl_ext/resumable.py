"""TRL's trainers that need nothing else, as runs that can be repeated."""

from trl import RewardTrainer, SFTTrainer

from .checkpoints import ResumableRun


class ResumableSFTTrainer(ResumableRun, SFTTrainer):
    """TRL's, which goes on only from a complete checkpoint of the same run."""


class ResumableRewardTrainer(ResumableRun, RewardTrainer):
    """TRL's, which goes on only from a complete checkpoint of the same run."""
