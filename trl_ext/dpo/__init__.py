# ruff: noqa: E402
from ..upstream.terminal import quiet

quiet()  # before what is imported next: some libraries make their remarks as they are imported

from .config import DPOConfig
from .trainer import DPOTrainer

__all__ = [
    "DPOConfig",
    "DPOTrainer",
]
