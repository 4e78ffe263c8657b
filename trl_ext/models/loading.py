"""How the models beside the policy are loaded and placed."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, disable_fsdp_ram_efficient_loading
from peft import AutoPeftModelForCausalLM
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.integrations import deepspeed

from ..upstream.names import prepare_deepspeed, prepare_fsdp
from ..upstream.temporarily import temporarily


@dataclass(frozen=True)
class Loader:
    """
    Load other models as the policy was loaded, and place them where they are run.

    Args:
        policy: the policy, plain or with adapters.
        path: what it was loaded from; None for an object.
        init_kwargs: what it was loaded with.
        trust_remote_code: as in transformers.
        accelerator: of the trainer.
    """

    policy: Any
    path: str | None
    init_kwargs: dict[str, Any]
    trust_remote_code: bool
    accelerator: Accelerator

    @property
    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments for `from_pretrained`: the policy's, but for the revision, which is the policy's own."""
        kwargs = {"dtype": self.policy.dtype, "trust_remote_code": self.trust_remote_code, **self.init_kwargs}
        kwargs.pop("revision", None)
        if self.accelerator.num_processes > 1 or self.is_deepspeed:
            kwargs["device_map"] = None  # by default TRL spreads a model over all GPUs
        return kwargs

    @property
    def is_deepspeed(self) -> bool:
        return self.accelerator.distributed_type == DistributedType.DEEPSPEED

    def again(self, load: Callable[..., Any]) -> Callable[[], Any] | None:
        """Return what loads the policy's weights once more, where ZeRO-3 has partitioned those that are there."""
        if self.path is None:
            return None
        return partial(load, self.path, revision=self.init_kwargs.get("revision"), **self.kwargs)

    def placed(self, model: nn.Module, shard: bool = True) -> Any:
        """Place a frozen model; FSDP shards it only if `shard` says so, DeepSpeed always."""
        if self.is_deepspeed:
            return prepare_deepspeed(model, self.accelerator)
        if shard and self.accelerator.distributed_type == DistributedType.FSDP:
            return prepare_fsdp(model, self.accelerator)
        return self.accelerator.prepare_model(model, evaluation_mode=True, device_placement=True)


@contextmanager
def whole_on_each_process() -> Iterator[None]:
    """Load models in full within the block, though FSDP or ZeRO-3 would have them sharded: nobody wraps them later."""
    from ..upstream.names import _hf_deepspeed_config_weak_ref as zero  # as it is now

    efficient = os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    disable_fsdp_ram_efficient_loading()
    try:
        with nullcontext() if zero is None else temporarily(deepspeed, _hf_deepspeed_config_weak_ref=None):
            yield
    finally:
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = efficient


def load_model(name: str) -> Any:
    """A causal language model, also one that is an adapter, in evaluation mode."""
    if (Path(name) / "adapter_config.json").is_file():
        model = AutoPeftModelForCausalLM.from_pretrained(name)
    else:
        model = AutoModelForCausalLM.from_pretrained(name)
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
