"""Configuration of [`CriticTrainer`]: the Trainer's settings, and PPO's settings for the scale of the returns."""

from dataclasses import dataclass
from typing import Any, Literal

from transformers import TrainingArguments

from ..runs.redaction import HidesCredentials
from ..runs.settings import (
    SavingSettings,
    check_score_settings,
    check_settings,
    documented,
    resolve_bf16,
    resolve_checkpointing,
    setting,
)
from .config import ReturnSettings


@documented
@dataclass
class CriticConfig(HidesCredentials, ReturnSettings, SavingSettings, TrainingArguments):
    """
    Configuration of [`CriticTrainer`].

    The settings that decide the scale of the returns have the names, defaults and meaning of [`PPOConfig`]. Give them
    the values that the later PPO run will have. The returns are Monte Carlo (λ = 1), whatever λ PPO uses.
    """

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs"]

    reward_normalization: Literal["none", "running", "batch", "group"] = setting(
        "none",
        "How scores are standardised, as in PPO. Here `running` and `batch` both use the mean and standard deviation "
        "of all saved rollouts; PPO's first rollouts have similar ones. PPO's `reference` is not available.",
    )
    reward_clip_range: tuple[float, float] | None = setting(None, "Bounds of the standardised score, as (min, max).")
    mask_truncated_completions: bool = setting(False, "Leave out the responses that do not end by EOS.")

    pad_to_multiple_of: int | None = setting(None, "Pad sequences to a length that is a multiple of so many tokens.")
    model_init_kwargs: dict[str, Any] | str | None = setting(
        None, "Keyword arguments of `from_pretrained`; they override those of `ModelConfig`. Read by the recipe."
    )
    trust_remote_code: bool = setting(False, "Whether to run code that comes with a model. Read by the recipe.")

    eval_on_start: bool = setting(True, "Evaluate before the first step, too, to compare with later evaluations.")
    logging_steps: float = setting(10, "Steps between two logs, or a share of all steps.")
    bf16: bool | None = setting(None, "Train in bfloat16 mixed precision; on where there is a GPU, if unset.")

    def __post_init__(self):
        resolve_bf16(self)
        resolve_checkpointing(self)
        check_settings(self)
        check_score_settings(self)
        super().__post_init__()
