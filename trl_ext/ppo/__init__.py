from ..upstream import quiet

quiet()  # before the imports below: some libraries print remarks when they are imported

from .config import PPOConfig
from .critic_trainer import CriticConfig, CriticTrainer, load_critic
from .roles import prepare_adapters
from .rollout import Rollout
from .reward_calls import score_rollouts
from .saved_rollouts import check_apart, with_finished, with_returns
from .trainer import PPOTrainer
from .vllm import ServerLost

__all__ = [
    "CriticConfig",
    "CriticTrainer",
    "PPOConfig",
    "PPOTrainer",
    "Rollout",
    "ServerLost",
    "check_apart",
    "prepare_adapters",
    "load_critic",
    "score_rollouts",
    "with_finished",
    "with_returns",
]
