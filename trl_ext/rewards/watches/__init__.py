"""Measure completions by reward functions of weight 0, since callbacks do not see completions."""

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
