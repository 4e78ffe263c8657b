"""Reward functions with TRL's signature. Those in `watches` measure completions; most of them reward nothing."""

from typing import TYPE_CHECKING

from ..upstream.lazy import lazily

if TYPE_CHECKING:
    from trl.rewards import (
        get_repetition_penalty_reward as get_repetition_penalty_reward,
        get_soft_overlong_punishment as get_soft_overlong_punishment,
    )

    from .cached import CachedReward as CachedReward, reward_identity as reward_identity
    from .combined import ConstitutionReward as ConstitutionReward, EnsembleReward as EnsembleReward
    from .judge import (
        DATA_ALONE as DATA_ALONE,
        JudgeReward as JudgeReward,
        conversation as conversation,
        message_of as message_of,
        tagged as tagged,
        verdicts_in as verdicts_in,
    )
    from .loading import (
        joined_weights as joined_weights,
        load_object as load_object,
        load_reward as load_reward,
        load_rewards as load_rewards,
    )
    from .member import (
        Member as Member,
        PatternReward as PatternReward,
        RewardFailed as RewardFailed,
        awaited as awaited,
        distinct as distinct,
        text_of as text_of,
        well_formed as well_formed,
    )
    from .model import ModelReward as ModelReward, logits_of as logits_of
    from .remote import RemoteReward as RemoteReward
    from .scores import scores_in as scores_in
    from .service import (
        Call as Call,
        RefusedError as RefusedError,
        ServiceError as ServiceError,
        WithheldError as WithheldError,
    )
    from .watches import (
        GoldJudgeReward as GoldJudgeReward,
        PhraseReviewReward as PhraseReviewReward,
        RepetitionWatch as RepetitionWatch,
        ScoreWatch as ScoreWatch,
        repetition_watch as repetition_watch,
        score_watch as score_watch,
    )

    __all__: list[str]
else:
    __getattr__, __dir__, __all__ = lazily(__name__, __file__)
