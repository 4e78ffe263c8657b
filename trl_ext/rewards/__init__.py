"""Reward functions with TRL's signature. Those in `watches` measure completions; most of them reward nothing."""

from typing import TYPE_CHECKING

from ..upstream.lazy import lazily

if TYPE_CHECKING:
    from trl.rewards import get_repetition_penalty_reward as get_repetition_penalty_reward
    from trl.rewards import get_soft_overlong_punishment as get_soft_overlong_punishment

    from .cached import CachedReward as CachedReward
    from .cached import reward_identity as reward_identity
    from .combined import ConstitutionReward as ConstitutionReward
    from .combined import EnsembleReward as EnsembleReward
    from .judge import DATA_ALONE as DATA_ALONE
    from .judge import JudgeReward as JudgeReward
    from .judge import conversation as conversation
    from .judge import message_of as message_of
    from .judge import tagged as tagged
    from .judge import verdicts_in as verdicts_in
    from .loading import joined_weights as joined_weights
    from .loading import load_object as load_object
    from .loading import load_reward as load_reward
    from .loading import load_rewards as load_rewards
    from .member import Member as Member
    from .member import PatternReward as PatternReward
    from .member import RewardFailed as RewardFailed
    from .member import awaited as awaited
    from .member import distinct as distinct
    from .member import text_of as text_of
    from .member import well_formed as well_formed
    from .model import ModelReward as ModelReward
    from .model import logits_of as logits_of
    from .remote import RemoteReward as RemoteReward
    from .scores import scores_in as scores_in
    from .service import Call as Call
    from .service import RefusedError as RefusedError
    from .service import ServiceError as ServiceError
    from .service import WithheldError as WithheldError
    from .watches import GoldJudgeReward as GoldJudgeReward
    from .watches import PhraseReviewReward as PhraseReviewReward
    from .watches import RepetitionWatch as RepetitionWatch
    from .watches import ScoreWatch as ScoreWatch
    from .watches import repetition_watch as repetition_watch
    from .watches import score_watch as score_watch

    __all__: list[str]
else:
    __getattr__, __dir__, __all__ = lazily(__name__, __file__)
