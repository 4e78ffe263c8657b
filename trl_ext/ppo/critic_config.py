"""Configuration of [`CriticTrainer`]: the Trainer's own, and what of `PPOConfig` decides the scale of the returns."""

from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import TrainingArguments

from ..runs.redaction import HidesCredentials
from ..runs.settings import SavingSettings, check_score_settings, check_settings, resolve_bf16, resolve_checkpointing
from .config import _ONLY_WITH as ONLY_WITH_OF_PPO
from .config import _RANGES as OF_PPO

_RANGES = {
    name: OF_PPO[name]
    for name in (
        "gamma",
        "gradient_accumulation_steps",
        "missing_eos_penalty",
        "per_device_eval_batch_size",
        "per_device_train_batch_size",
    )
}
_ONLY_WITH = {"reward_group_column": ONLY_WITH_OF_PPO["reward_group_column"]}
_REFUSED: dict[str, Any] = {  # any value but this one would do nothing, or harm
    "batch_eval_metrics": False,
    "eval_accumulation_steps": None,
    "eval_do_concat_batches": True,
    "eval_use_gather_object": False,
    "include_for_metrics": [],
    "label_names": None,
    "label_smoothing_factor": 0.0,
    "neftune_noise_alpha": None,
    "prediction_loss_only": False,
    "torch_compile": False,
    "use_liger_kernel": False,
}


@dataclass
class CriticConfig(HidesCredentials, SavingSettings, TrainingArguments):
    """
    Configuration of [`CriticTrainer`].

    What decides the scale of the returns has the names, defaults and meaning of [`PPOConfig`]: give it as the PPO run
    that the critic is for will have it.

    Parameters:
        > Parameters that control the returns

        gamma (`float`, defaults to `1.0`):
            Discount a token. The returns are Monte Carlo (λ = 1), whatever λ PPO uses.
        reward_weights (`list[float]`, *optional*):
            Weight of each reward function; 1 if unset.
        reward_normalization (`Literal["none", "running", "batch", "group"]`, defaults to `"none"`):
            What scores are standardised by. PPO's `"running"` and `"batch"` are both the moments of all saved
            rollouts here, which those of its first rollouts estimate. PPO's `"reference"` is not known here.
        reward_group_column (`str`, *optional*):
            Column that names the row's group, for `"group"`.
        reward_clip_range (`tuple[float, float]`, *optional*):
            Bounds of the standardised score.
        missing_eos_score (`float`, *optional*), missing_eos_penalty (`float`, *optional*):
            Score of a response that does not end by EOS, or what is subtracted from it.
        mask_truncated_completions (`bool`, defaults to `False`):
            Leave out the responses that do not end by EOS.
        whiten_rewards (`bool`, defaults to `False`):
            Divide token rewards by their standard deviation (the mean is kept).

        > Parameters that control the model

        padding_free (`bool`, defaults to `True`):
            Put rows behind each other in a forward, as PPO does.
        pad_to_multiple_of (`int`, *optional*):
            Tokens that the length of a forward's sequences is a multiple of.
        model_init_kwargs (`dict[str, Any]`, *optional*):
            Keyword arguments of `from_pretrained`, over those of `ModelConfig`. Read by the recipe.
        trust_remote_code (`bool`, defaults to `False`):
            As in transformers. Read by the recipe.

        > Parameters that control checkpoints

        save_in_background (`bool`, defaults to `False`), on_save_failure (`str`, defaults to `"stop"`):
            As in [`PPOConfig`].
        record_run (`bool`, defaults to `True`):
            As in [`PPOConfig`], without completions.

        > Parameters whose defaults are not the Trainer's

        eval_on_start (`bool`, defaults to `True`):
            Evaluate before the first step, which tells what the training has brought.
        logging_steps (`float`, defaults to `10`), bf16 (`bool`, *optional*):
            As TRL's configurations have them; `bf16` is on where there is a GPU.
    """

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs"]

    gamma: float = field(default=1.0, metadata={"help": "Discount factor."})
    reward_weights: list[float] | None = field(default=None, metadata={"help": "Weight of each reward; 1 if unset."})
    reward_normalization: Literal["none", "running", "batch", "group"] = field(
        default="none", metadata={"help": "What scores are standardised by, as PPO will do it."}
    )
    reward_group_column: str | None = field(
        default=None, metadata={"help": "Column with the group, for `reward_normalization: group`."}
    )
    reward_clip_range: tuple[float, float] | None = field(
        default=None, metadata={"help": "Bounds of the standardised score, as (min, max)."}
    )
    missing_eos_score: float | None = field(
        default=None, metadata={"help": "Score of a response without EOS, in place of its own."}
    )
    missing_eos_penalty: float | None = field(
        default=None, metadata={"help": "Subtracted from the score of a response without EOS."}
    )
    mask_truncated_completions: bool = field(default=False, metadata={"help": "Leave out responses without EOS."})
    whiten_rewards: bool = field(default=False, metadata={"help": "Whiten token rewards, keeping their mean."})

    padding_free: bool = field(default=True, metadata={"help": "Put rows behind each other in a forward."})
    pad_to_multiple_of: int | None = field(
        default=None, metadata={"help": "Tokens that the length of a sequence is a multiple of."}
    )
    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Keyword arguments of `from_pretrained`."}
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "Whether to run code that comes with a model."})

    eval_on_start: bool = field(default=True, metadata={"help": "Evaluate before the first step."})
    logging_steps: float = field(default=10, metadata={"help": "Steps between two logs, or a share of all steps."})
    bf16: bool | None = field(
        default=None, metadata={"help": "Train in bfloat16 mixed precision; on where there is a GPU, if unset."}
    )

    def __post_init__(self):
        resolve_bf16(self)
        resolve_checkpointing(self)
        check_settings(self, _RANGES, _ONLY_WITH)
        for name, default in _REFUSED.items():
            if (value := getattr(self, name)) != default:
                raise ValueError(f"`{name}={value}` does nothing for a critic: leave it out.")
        check_score_settings(self)
        if self.reward_normalization == "group" and not self.reward_group_column:
            raise ValueError("`reward_normalization='group'` needs `reward_group_column`, the column to group by.")
        super().__post_init__()
        if self.n_gpu > 1:
            raise ValueError(
                f"One process sees {self.n_gpu} GPUs: start one for each, as `trl-ext pretrain-critic "
                "--num_processes` does, or show it one by CUDA_VISIBLE_DEVICES."
            )
