from .actor_critic import ActorCritic
from .adapters import save_base_fingerprint
from .config import PPOConfig
from .trainer import PPOTrainer

__all__ = ["ActorCritic", "PPOConfig", "PPOTrainer", "save_base_fingerprint"]
