"""TRL's trainers that need nothing else, as runs that can be repeated."""

from typing import Any

import trl
from trl import RewardTrainer, SFTTrainer

from .callbacks.console import ConsoleCallback
from .checkpoints import ResumableRun
from .redaction import HidesCredentials


class SFTConfig(HidesCredentials, trl.SFTConfig):
    """TRL's, which shows no credential to W&B, TensorBoard and the like."""


class RewardConfig(HidesCredentials, trl.RewardConfig):
    """TRL's, which shows no credential to W&B, TensorBoard and the like."""


class _Run(ResumableRun):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        ConsoleCallback.replace(self)


class ResumableSFTTrainer(_Run, SFTTrainer):
    """TRL's, which goes on only from a complete checkpoint of the same run."""


class ResumableRewardTrainer(_Run, RewardTrainer):
    """TRL's, which goes on only from a complete checkpoint of the same run."""
