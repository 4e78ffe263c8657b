"""Every name of TRL, transformers and PEFT that is not public API and that we import: pinned by
`tests/test_trl_contract.py`, which also pins the private attributes and call orders that subclasses rely on."""

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.modeling_utils import set_zero3_state
from transformers.trainer_utils import rotate_checkpoints, sort_checkpoints
from transformers.utils import find_adapter_config_file
from trl.data_utils import is_conversational
from trl.import_utils import is_vllm_available
from trl.models import prepare_deepspeed, prepare_fsdp, unwrap_model_for_generation
from trl.models.utils import add_hooks, remove_hooks
from trl.trainer.utils import (
    RepeatSampler,
    add_fused_lm_head,
    create_model_from_path,
    disable_dropout_in_model,
    get_callable_name,
    get_config_model_id,
    is_async_callable,
    use_adapter,
)

__all__ = [
    "AuxiliaryTrainingWrapper",
    "BaseTunerLayer",
    "RepeatSampler",
    "add_fused_lm_head",
    "add_hooks",
    "create_model_from_path",
    "disable_dropout_in_model",
    "find_adapter_config_file",
    "get_callable_name",
    "get_config_model_id",
    "is_async_callable",
    "is_conversational",
    "is_deepspeed_zero3_enabled",
    "is_vllm_available",
    "prepare_deepspeed",
    "prepare_fsdp",
    "remove_hooks",
    "rotate_checkpoints",
    "set_zero3_state",
    "sort_checkpoints",
    "unwrap_model_for_generation",
    "use_adapter",
]
