"""What every recipe asks for, in TRL's words: a dataset, a model, and where a policy learns from scores, a reward."""

from dataclasses import dataclass, field
from typing import Any

import trl
from trl import ModelConfig, ScriptArguments

from .redaction import HidesCredentials


class SFTConfig(HidesCredentials, trl.SFTConfig):
    """TRL's, which shows no credential to W&B, TensorBoard and the like."""


class RewardConfig(HidesCredentials, trl.RewardConfig):
    """TRL's, which shows no credential to W&B, TensorBoard and the like."""


@dataclass
class DataArguments(ScriptArguments):
    """TRL's `ScriptArguments`, with a dataset that must be named and is not streamed."""

    def __post_init__(self) -> None:
        if not self.dataset_name:
            raise ValueError("no dataset: give `dataset_name`, a hub name, a .jsonl file or a folder")
        if self.dataset_streaming or self.ignore_bias_buffers:
            raise ValueError("`dataset_streaming` and `ignore_bias_buffers` are not supported: leave them unset")


@dataclass
class PromptArguments(DataArguments):
    """Prompts, and what scores the answers to them."""

    reward_model_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "Sequence classifier with one label. `reward_weights` are: this model's, then `reward_funcs`'."
        },
    )
    reward_funcs: list[str] | None = field(
        default=None,
        metadata={"help": "Reward functions, each `path/to/file.py:function` or `package.module.function`."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.reward_model_name_or_path or self.reward_funcs):
            raise ValueError("no reward: give `reward_model_name_or_path`, `reward_funcs`, or both")


@dataclass
class ModelArguments(ModelConfig):
    """TRL's `ModelConfig`, with a model that must be named."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model_name_or_path is None:
            raise ValueError("no model: give `model_name_or_path`, a folder or a hub name")

    def init_kwargs(self, model_init_kwargs: dict[str, Any] | None) -> dict[str, Any]:
        """What the model is loaded with: these arguments, and over them the training arguments' own."""
        return {
            "revision": self.model_revision,
            "attn_implementation": self.attn_implementation,
            "dtype": self.dtype,
            **(model_init_kwargs or {}),
        }
