"""Reward functions with TRL's signature. Those in `watches` measure completions; most of them reward nothing."""

from typing import TYPE_CHECKING

from ..upstream import lazily

if TYPE_CHECKING:
    from trl.rewards import get_repetition_penalty_reward as get_repetition_penalty_reward
    from trl.rewards import get_soft_overlong_punishment as get_soft_overlong_punishment

    from .background import *
    from .cached import *
    from .combined import *
    from .completions import *
    from .from_yaml import *
    from .judge import *
    from .member import *
    from .model import *
    from .pattern import *
    from .remote import *
    from .scores import *
    from .service import *
    from .watches import *

    __all__: list[str]
else:
    __getattr__, __dir__, __all__ = lazily(
        __name__,
        {
            "trl.rewards": "get_repetition_penalty_reward get_soft_overlong_punishment",
            ".background": "awaited",
            ".cached": "CachedReward reward_identity",
            ".combined": "ConstitutionReward EnsembleReward",
            ".completions": "text_of well_formed",
            ".from_yaml": "joined_weights load_object load_reward load_rewards",
            ".judge": "DATA_ALONE JudgeReward conversation message_of tagged verdicts_in",
            ".member": "Member RewardFailed distinct",
            ".model": "ModelReward logits_of",
            ".pattern": "PatternReward",
            ".remote": "RemoteReward",
            ".scores": "scores_in",
            ".service": "Call RefusedError ServiceError WithheldError",
            ".watches": "GoldJudgeReward PhraseReviewReward RepetitionWatch ScoreWatch repetition_watch score_watch",
        },
    )
