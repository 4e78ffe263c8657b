from .config import DPOConfig
from .trainer import DPOTrainer

__all__ = ["DPOConfig", "DPOTrainer"]
