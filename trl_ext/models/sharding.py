"""Sharded weights are gathered once for all that a rollout generates."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule
from trl import RLOOConfig

from ..upstream.names import add_hooks, remove_hooks
from ..upstream.temporarily import temporarily


@contextmanager
def gathered_by_zero3(engine: nn.Module, policy: nn.Module, args: RLOOConfig) -> Iterator[None]:
    """The weights of `policy` whole within. (TRL gathers all of `engine`, the critic too, and for each batch anew.)"""
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
    What the layers of `policy` gather in their first forward stays whole until the end, if FSDP2 has sharded it.
    Otherwise each layer would be gathered for each token.
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
