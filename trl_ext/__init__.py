"""PPO with a critic, and DPO, for language models, on Hugging Face TRL.

Public names load on first use: `import trl_ext` alone imports neither torch nor trl.
"""

from importlib.metadata import version
from typing import TYPE_CHECKING

from .upstream import lazily

if TYPE_CHECKING:
    from . import functional as functional
    from .cli.parser import StrictTrlParser as StrictTrlParser
    from .data import load_dataset_split as load_dataset_split
    from .dpo import DPOConfig as DPOConfig, DPOTrainer as DPOTrainer
    from .models import save_base_fingerprint as save_base_fingerprint
    from .ppo import CriticConfig as CriticConfig, CriticTrainer as CriticTrainer
    from .ppo import PPOConfig as PPOConfig, PPOTrainer as PPOTrainer

    __version__: str
else:
    _load, _names, __all__ = lazily(
        __name__,
        {
            ".functional": "functional",
            ".cli.parser": "StrictTrlParser",
            ".data": "load_dataset_split",
            ".dpo": "DPOConfig DPOTrainer",
            ".models": "save_base_fingerprint",
            ".ppo": "CriticConfig CriticTrainer PPOConfig PPOTrainer",
        },
    )

    def __getattr__(name):
        return version("trl-ext") if name == "__version__" else _load(name)

    def __dir__():
        return [*_names(), "__version__"]
