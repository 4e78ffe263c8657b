"""Gather sharded weights once for a whole rollout."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule
from trl import RLOOConfig

from ..upstream.names import add_hooks, remove_hooks
from ..upstream.temporarily import temporarily


@contextmanager
def gathered_by_zero3(engine: nn.Module, policy: nn.Module, args: RLOOConfig) -> Iterator[None]:
    """
    Gather the policy's weights once, and keep them whole until the end of the block.

    TRL would gather the critic's weights, too, and would gather all of them anew for each batch.
    """
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(policy.parameters())):
        remove_hooks(engine)
        try:
            with temporarily(args, ds3_gather_for_generation=False):
                yield
        finally:
            add_hooks(engine)


@contextmanager
def kept_by_fsdp2(policy: nn.Module) -> Iterator[None]:
    """
    Keep the weights that FSDP2 gathers in the policy's first forward until the end of the block.

    Otherwise FSDP2 would gather each layer's weights anew for each generated token.
    """
    layers = [module for module in policy.modules() if isinstance(module, FSDPModule)]
    groups = [group for layer in layers for group in layer._get_fsdp_state()._fsdp_param_groups]
    reshard = [group.post_forward_mesh_info for group in groups]
    for layer in layers:
        layer.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for group, info in zip(groups, reshard, strict=True):
            group.post_forward_mesh_info = info
        for layer in layers:
            layer.reshard()
