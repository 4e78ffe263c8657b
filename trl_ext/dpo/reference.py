"""A reference for a policy that has no path to load it from."""

import copy
from typing import Any

from accelerate.utils import is_peft_model
from torch import nn

from ..upstream import get_config_model_id


def needs_copy(model: Any, peft_config: Any) -> bool:
    """Whether TRL would look for the reference at the path of a model that has none."""
    return (
        isinstance(model, nn.Module)
        and peft_config is None
        and not is_peft_model(model)
        and not get_config_model_id(model.config)
    )


def frozen_copy(model: nn.Module) -> nn.Module:
    """The model as it is now, without the forward that another trainer may have patched onto it."""
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise ValueError(
            f"The reference would be a copy of a {type(model).__name__} whose weights ZeRO-3 has already partitioned: "
            "pass `ref_model`, or the model as a path."
        )
    twin = copy.deepcopy(model)
    vars(twin).pop("forward", None)
    return twin.requires_grad_(False).eval()
