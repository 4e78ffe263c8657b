"""Every name of TRL, transformers and PEFT that is not public API and that we import: pinned by
`tests/test_trl_contract.py`, which also pins the private attributes and call orders that subclasses rely on."""

from transformers.trainer_utils import rotate_checkpoints, sort_checkpoints
from trl.data_utils import is_conversational
from trl.models import prepare_deepspeed, prepare_fsdp
from trl.trainer.callbacks import _generate_completions as generate_completions
from trl.trainer.utils import (
    RepeatSampler,
    add_fused_lm_head,
    create_model_from_path,
    disable_dropout_in_model,
    get_callable_name,
    get_config_model_id,
    is_async_callable,
)

__all__ = [
    "RepeatSampler",
    "add_fused_lm_head",
    "create_model_from_path",
    "disable_dropout_in_model",
    "generate_completions",
    "get_callable_name",
    "get_config_model_id",
    "is_async_callable",
    "is_conversational",
    "prepare_deepspeed",
    "prepare_fsdp",
    "rotate_checkpoints",
    "sort_checkpoints",
]
