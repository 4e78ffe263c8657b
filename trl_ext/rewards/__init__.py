"""Reward functions with TRL's signature. Those in `watches` have weight zero and only measure."""

from trl.rewards import get_repetition_penalty_reward, get_soft_overlong_punishment

from ..sources import source_identity
from .cached import CachedReward
from .code import CodeReward
from .constitution import ConstitutionReward
from .ensemble import EnsembleReward
from .json_schema import JSONSchemaReward
from .judge import JudgeReward
from .loading import check_rewards, joined_weights, load_reward, load_rewards
from .member import Member, RewardFailed, distinct
from .model import ModelReward
from .patterns import PatternReward
from .remote import RemoteReward
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
    "CachedReward",
    "CodeReward",
    "ConstitutionReward",
    "EnsembleReward",
    "GoldJudgeReward",
    "JSONSchemaReward",
    "JudgeReward",
    "Member",
    "ModelReward",
    "PatternReward",
    "PhraseReviewReward",
    "RemoteReward",
    "RepetitionWatch",
    "RewardFailed",
    "ScoreWatch",
    "SegmentScores",
    "SumReward",
    "check_rewards",
    "distinct",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "joined_weights",
    "load_reward",
    "load_rewards",
    "repetition_watch",
    "score_watch",
    "source_identity",
]
