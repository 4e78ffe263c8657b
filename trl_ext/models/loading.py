"""Load the models beside the policy, such as the reference, and put them on their devices."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, patch_environment
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.integrations import deepspeed

from ..upstream.names import prepare_deepspeed, prepare_fsdp
from ..upstream.temporarily import temporarily
from .adapters import is_adapter
from .saved_adapter import load_adapted


@dataclass(frozen=True)
class Loader:
    """
    Load other models as the policy was loaded, and place them on their devices.

    Args:
        policy: the policy, plain or with adapters.
        path: what the policy was loaded from; None if it was passed in as an object.
        init_kwargs: the keyword arguments that the policy was loaded with.
        trust_remote_code: as in transformers.
        accelerator: the trainer's accelerator.
    """

    policy: Any
    path: str | None
    init_kwargs: dict[str, Any]
    trust_remote_code: bool
    accelerator: Accelerator

    @property
    def kwargs(self) -> dict[str, Any]:
        """Return the policy's keyword arguments of `from_pretrained`, without its revision."""
        kwargs = {"dtype": self.policy.dtype, "trust_remote_code": self.trust_remote_code, **self.init_kwargs}
        kwargs.pop("revision", None)
        if self.accelerator.num_processes > 1 or self.is_deepspeed:
            kwargs["device_map"] = None  # by default TRL spreads a model over all GPUs
        return kwargs

    @property
    def is_deepspeed(self) -> bool:
        return self.accelerator.distributed_type == DistributedType.DEEPSPEED

    def again(self, load: Callable[..., Any]) -> Callable[[], Any] | None:
        """
        Return a function that loads the policy's weights again, by `load`; None if the policy has no path.

        ZeRO-3 needs such a function, since a model that it has partitioned cannot be copied.
        """
        if self.path is None:
            return None
        return partial(load, self.path, revision=self.init_kwargs.get("revision"), **self.kwargs)

    def placed(self, model: nn.Module, shard: bool = True) -> Any:
        """Place a frozen model on its device. ZeRO-3 shards it; FSDP shards it only if `shard` is set."""
        if self.is_deepspeed:
            return prepare_deepspeed(model, self.accelerator)
        if shard and self.accelerator.distributed_type == DistributedType.FSDP:
            return prepare_fsdp(model, self.accelerator)
        return self.accelerator.prepare_model(model, evaluation_mode=True, device_placement=True)


@contextmanager
def whole_on_each_process() -> Iterator[None]:
    """
    Load models in full on every process within the block.

    Otherwise FSDP would load the weights on the first process alone, and ZeRO-3 would shard them.
    """
    from ..upstream.names import _hf_deepspeed_config_weak_ref as zero  # its present value

    without_zero3 = nullcontext() if zero is None else temporarily(deepspeed, _hf_deepspeed_config_weak_ref=None)
    with patch_environment(FSDP_CPU_RAM_EFFICIENT_LOADING="false"), without_zero3:
        yield


def load_model(name: str, device: Any = None, revision: str | None = None, dtype: str = "auto") -> Any:
    """Load a causal language model, plain or an adapter, in evaluation mode; by default on the GPU if there is one."""
    if is_adapter(name, revision):
        model = load_adapted(name, revision, dtype=dtype, device_map=None)
    else:
        model = AutoModelForCausalLM.from_pretrained(name, revision=revision or "main", dtype=dtype)
    return model.eval().to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
