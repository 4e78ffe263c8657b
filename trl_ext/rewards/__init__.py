"""Reward functions with TRL's signature. Those in `watches` have weight zero and only measure."""

from ..sources import source_identity
from .ensemble import EnsembleReward
from .judge import JudgeReward
from .loading import load_reward
from .model import ModelReward
from .remote import RemoteReward
from .watches import (
    GoldJudgeReward,
    PhraseReviewReward,
    RepetitionWatch,
    ScoreWatch,
    repetition_watch,
    score_watch,
)

__all__ = [
    "EnsembleReward",
    "GoldJudgeReward",
    "JudgeReward",
    "ModelReward",
    "PhraseReviewReward",
    "RemoteReward",
    "RepetitionWatch",
    "ScoreWatch",
    "load_reward",
    "repetition_watch",
    "score_watch",
    "source_identity",
]
