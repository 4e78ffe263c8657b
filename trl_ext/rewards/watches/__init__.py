"""Measure completions, which no callback sees, by reward functions of weight 0."""

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
