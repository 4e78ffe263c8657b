from .actor_critic import ActorCritic
from .config import PPOConfig
from .trainer import PPOTrainer

__all__ = ["ActorCritic", "PPOConfig", "PPOTrainer"]
