"""Stop a run whose adapter does not change in training, before days are lost on it."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from .adapter_switch import CRITIC, POLICY


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # FSDP2's shard


class AdapterGuard(TrainerCallback):
    """
    Raise a `RuntimeError` if an optimizer step changes no weight of an adapter or value head that it should train.

    The policy's adapter, the critic's adapter and the value head are each checked once: at the first step in which the
    part has a gradient and a learning rate above 0. After training, warn of LoRA matrices B that are all zero, as they
    were at the beginning.

    Under DeepSpeed no step is checked: its engine has no gradients left when callbacks run.
    """

    def __init__(self):
        self.watched = {"policy's adapter", "critic's adapter", "value head"}
        self.before: dict[str, list[Tensor]] = {}
        self.due: set[str] = set()

    def _parameters(self, model: nn.Module) -> dict[str, list[nn.Parameter]]:
        found: dict[str, list[nn.Parameter]] = {part: [] for part in self.watched}
        for name, parameter in model.named_parameters() if self.watched else ():
            names = name.split(".")
            is_in = {"value head": names[0] == "critic", "critic's adapter": CRITIC in names}
            part = next((part for part in is_in if is_in[part]), "policy's adapter" if POLICY in names else None)
            if part in found:  # frozen ones, too: another callback may unfreeze them before the step's forward
                found[part].append(parameter)
        return found

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.before = {part: [_local(p).detach().clone() for p in ps] for part, ps in self._parameters(model).items()}

    def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
        self.due = {
            part
            for part, ps in self._parameters(model).items()
            if any(rates.get(id(p), True) and p.grad is not None and bool(_local(p.grad).any()) for p in ps)
        }

    def on_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        if getattr(optimizer, "step_was_skipped", False):  # fp16 with an overflow
            return
        after = self._parameters(model)
        for part in self.due:
            if all(torch.equal(_local(p), old) for p, old in zip(after[part], self.before[part], strict=True)):
                dtype = after[part][0].dtype
                raise RuntimeError(
                    f"The {part} ({dtype}) had a gradient and a learning rate at step {state.global_step + 1}, but "
                    "none of its weights changed. Either the learning rate is too small for this dtype (bfloat16 "
                    "rounds away an update of less than 0.4 % of a weight), or the optimizer steps on other tensors. "
                    "Raise the rate, use float32 adapters, or pass the optimizer these weights."
                )
        self.watched -= self.due
        self.before = {}

    def on_train_end(self, args, state, control, model=None, **kwargs):
        trained = {
            name: parameter
            for name, parameter in model.named_parameters()
            if {"lora_B", "lora_embedding_B"} & {*(parts := name.split("."))} and {POLICY, CRITIC} & {*parts}
            if not (CRITIC in parts and getattr(model, "critic_is_frozen", False))
        }
        moved = [bool(_local(getattr(p, "ds_tensor", p)).any()) for p in trained.values()]
        if torch.distributed.is_initialized():  # each process sees its own shard
            seen = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(seen, moved)
            moved = [any(flags) for flags in zip(*seen, strict=True)]
        zero = [name for name, has_moved in zip(trained, moved, strict=True) if not has_moved]
        if zero and state.is_world_process_zero:
            warnings.warn(
                f"{len(zero)} of {len(trained)} LoRA matrices B are still all zero after {state.global_step} steps, "
                f"so their layers have learned nothing ({zero[0]}). Either no gradient reached them, or the learning "
                "rate was 0 or too small for their dtype, or they were frozen.",
                UserWarning,
                stacklevel=2,
            )
