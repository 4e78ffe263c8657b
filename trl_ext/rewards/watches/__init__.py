"""Reward functions that measure and reward nothing: give them weight 0. They see completions, as no callback does."""

from .gold_judge import GoldJudgeReward
from .phrases import PhraseReviewReward
from .repetition import RepetitionWatch, repetition_watch
from .scores import ScoreWatch, score_watch

__all__ = [
    "GoldJudgeReward",
    "PhraseReviewReward",
    "RepetitionWatch",
    "ScoreWatch",
    "repetition_watch",
    "score_watch",
]
