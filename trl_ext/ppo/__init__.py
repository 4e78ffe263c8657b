from .config import PPOConfig
from .trainer import PPOTrainer
from .vllm import ServerLost

__all__ = ["PPOConfig", "PPOTrainer", "ServerLost"]
