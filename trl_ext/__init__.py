"""PPO with a critic, and DPO, for language models, on Hugging Face TRL.

Public names load on first use: `import trl_ext` alone imports neither torch nor trl.
"""

import sys
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from .moved import OldNames

if TYPE_CHECKING:
    from . import functional
    from .data import load_dataset_split
    from .dpo import DPOConfig, DPOTrainer
    from .models import save_base_fingerprint
    from .parser import StrictTrlParser
    from .ppo import CriticConfig, CriticTrainer, PPOConfig, PPOTrainer

_MODULES = {
    "CriticConfig": "trl_ext.ppo",
    "CriticTrainer": "trl_ext.ppo",
    "DPOConfig": "trl_ext.dpo",
    "DPOTrainer": "trl_ext.dpo",
    "PPOConfig": "trl_ext.ppo",
    "PPOTrainer": "trl_ext.ppo",
    "StrictTrlParser": "trl_ext.parser",
    "load_dataset_split": "trl_ext.data",
    "save_base_fingerprint": "trl_ext.models",
}

__all__ = [
    "CriticConfig",
    "CriticTrainer",
    "DPOConfig",
    "DPOTrainer",
    "PPOConfig",
    "PPOTrainer",
    "StrictTrlParser",
    "functional",
    "load_dataset_split",
    "save_base_fingerprint",
]

sys.meta_path.insert(0, OldNames())  # before the finder that would load the files of a moved package a second time


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("trl-ext")
    if name == "functional":
        return import_module("trl_ext.functional")
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'trl_ext' has no attribute {name!r}; its public names are {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, "__version__"])
