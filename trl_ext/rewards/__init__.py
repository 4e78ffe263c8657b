"""Reward functions with TRL's signature. Most have weight zero and only measure what no callback sees: completions."""

from ..sources import source_identity
from .gold_judge import GoldJudgeReward
from .loading import load_reward
from .model import ModelReward
from .phrases import PhraseReviewReward
from .repetition import RepetitionWatch, repetition_watch
from .scores import ScoreWatch, score_watch

__all__ = [
    "GoldJudgeReward",
    "ModelReward",
    "PhraseReviewReward",
    "RepetitionWatch",
    "ScoreWatch",
    "load_reward",
    "repetition_watch",
    "score_watch",
    "source_identity",
]
