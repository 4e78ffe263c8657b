"""Reward functions with TRL's signature. Those in `watches` have weight zero and only measure."""

from ..sources import source_identity
from .loading import joined_weights, load_reward, load_rewards
from .member import Member, distinct
from .model import ModelReward
from .segments import SegmentScores
from .sum import SumReward
from .watches import (
    GoldJudgeReward,
    PhraseReviewReward,
    RepetitionWatch,
    ScoreWatch,
    repetition_watch,
    score_watch,
)

__all__ = [
    "GoldJudgeReward",
    "Member",
    "ModelReward",
    "PhraseReviewReward",
    "RepetitionWatch",
    "ScoreWatch",
    "SegmentScores",
    "SumReward",
    "distinct",
    "joined_weights",
    "load_reward",
    "load_rewards",
    "repetition_watch",
    "score_watch",
    "source_identity",
]
