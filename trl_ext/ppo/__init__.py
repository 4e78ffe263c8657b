from .config import PPOConfig
from .trainer import PPOTrainer

__all__ = ["PPOConfig", "PPOTrainer"]
