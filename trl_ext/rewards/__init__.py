"""Reward functions with TRL's signature. Those in `watches` have weight zero and only measure."""

from trl.rewards import get_repetition_penalty_reward, get_soft_overlong_punishment

from ..sources import source_identity
from .cached import CachedReward
from .code import CodeReward
from .constitution import ConstitutionReward
from .json_schema import JSONSchemaReward
from .loading import load_reward
from .model import ModelReward
from .patterns import PatternReward
from .watches import (
    GoldJudgeReward,
    PhraseReviewReward,
    RepetitionWatch,
    ScoreWatch,
    repetition_watch,
    score_watch,
)

__all__ = [
    "CachedReward",
    "CodeReward",
    "ConstitutionReward",
    "GoldJudgeReward",
    "JSONSchemaReward",
    "ModelReward",
    "PatternReward",
    "PhraseReviewReward",
    "RepetitionWatch",
    "ScoreWatch",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "load_reward",
    "repetition_watch",
    "score_watch",
    "source_identity",
]
