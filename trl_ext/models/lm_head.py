"""Run the LM head of a log-prob pass: compute all logits at once if they fit a budget, else in TRL's tiles."""

import functools
import sys
import types
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.utils import is_triton_available

from ..functional import logprobs_and_entropies
from ..upstream.names import FusedCausalLMOutput, _backward_tile, _forward_tile, selective_log_softmax_and_entropy
from ..upstream.statements import temporarily

GIB = 2**30


def add_dense_lm_head(model: Any, temperature: float = 1.0, budget_gb: float = 1.0) -> None:
    """
    Make a model with TRL's fused LM head compute all logits of a log-prob pass at once, if they fit a budget.

    Such a pass is `model(..., predicts=, targets=, fused_lm_head=True)`. It runs the LM head only after N tokens:
    `predicts` are their indices, from 0 to K · C − 1 for K rows of C tokens. `targets` are the ids of the tokens that
    are chosen next. The output has the targets' `log_probs`, (N,), nats. With `with_entropies=True` it also has the
    `entropy`, (N,), nats, of the distributions that the targets are chosen from.

    If the N tokens' logits exceed the budget, TRL's head computes the same results tile by tile. This takes less
    memory, but more time, since the logits are computed once more in the backward pass.

    With the argument `budget_tokens`, the logits of so many tokens are compared with the budget, instead of those of N
    tokens. Pass it on sharded models, where N differs between processes: all processes must choose the same head,
    since the two heads gather different weights.

    Args:
        model: a causal language model after TRL's `add_fused_lm_head`, not its PEFT wrapper.
        temperature: divides the logits, as in TRL's head.
        budget_gb: GiB that the logits of one call may take; 0 leaves everything to TRL's head.
    """
    trl_forward = model.forward

    @functools.wraps(type(model).forward)  # `generate` reads the signature
    def forward(
        self: Any,
        *args: Any,
        fused_lm_head: bool = False,
        predicts: Tensor | None = None,
        targets: Tensor | None = None,
        with_entropies: bool = False,
        budget_tokens: int | None = None,
        **kwargs: Any,
    ) -> Any:
        if predicts is None or targets is None:
            return trl_forward(*args, fused_lm_head=fused_lm_head, **kwargs)
        numbers = (budget_tokens or len(predicts)) * self.config.get_text_config().vocab_size
        kwargs["use_cache"] = False
        if numbers * _dtype_of_logits(self, predicts.device).itemsize > budget_gb * GIB:
            with _backbone_gives(self.base_model, predicts):
                output = trl_forward(*args, fused_lm_head=True, shift_labels=targets[None], **kwargs)
            logprobs = output.log_probs[0]
            entropies = None if output.entropy is None else output.entropy[0]
        else:
            with _head_takes(self.get_output_embeddings(), predicts):
                output = trl_forward(*args, **kwargs)
            _unview_gradient(output.logits.grad_fn)
            logits = output.logits.flatten(0, 1)
            targets = targets.to(output.logits.device)
            if len(logits) != len(targets):  # the model multiplies by the head's weight instead of calling it
                logits = logits[predicts]
            if logits.is_cuda and is_triton_available():  # TRL's kernel is in Triton
                logprobs, entropies = selective_log_softmax_and_entropy(logits, targets, temperature=temperature)
            else:
                logprobs, entropies = logprobs_and_entropies(logits, targets, temperature, with_entropies)
        return FusedCausalLMOutput(log_probs=logprobs, entropy=entropies, aux_loss=getattr(output, "aux_loss", None))

    model.forward = types.MethodType(forward, model)


def lm_head_in_place() -> AbstractContextManager:
    """
    Make TRL's LM head skip its work on each tile of logits within the `with` block, to measure memory.

    On a CPU this work makes large tensors, which a GPU's kernels do without. Without the work, a pass over fake
    tensors on a CPU takes as much memory as on a GPU. The results are wrong.
    """
    tiles = (_forward_tile, _backward_tile)
    nothing = dict.fromkeys((tile.__name__ for tile in tiles), lambda *_, **__: None)
    return temporarily(sys.modules[_forward_tile.__module__], **nothing)


def _head_takes(head: nn.Module, predicts: Tensor) -> RemovableHandle:
    """Make `head` read only the N states at `predicts` of its (K, C, H) input, as (1, N, H), in the `with` block."""
    return head.register_forward_pre_hook(lambda _, inputs: (_at(inputs[0], predicts), *inputs[1:]))


def _backbone_gives(backbone: nn.Module, predicts: Tensor) -> RemovableHandle:
    """Make `backbone` return only the N states at `predicts` of (K, C, H), as (1, N, H), within the `with` block."""

    def choose(module: nn.Module, inputs: Any, output: Any) -> Any:
        output.last_hidden_state = _at(output.last_hidden_state, predicts)
        return output

    return backbone.register_forward_hook(choose)


def _at(states: Tensor, predicts: Tensor) -> Tensor:
    return states.flatten(0, 1)[predicts.to(states.device)][None]


def _unview_gradient(node: Any, steps: int = 6) -> None:
    """Make autograd add the head's part to the gradient of tied embeddings in place; search `steps` nodes back."""
    # Soft-capping has three nodes, the head's product two
    if node is None or not steps:
        return
    # A linear layer returns its weight's gradient as a view, which this node makes. Autograd adds in place only to a
    # tensor that is none
    if node.name() == "TBackward0":
        node.register_hook(lambda gradients, _: tuple(g if g is None else g.data for g in gradients))
        return
    for before, _ in node.next_functions:
        _unview_gradient(before, steps - 1)


def _dtype_of_logits(model: Any, device: torch.device) -> torch.dtype:
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return model.get_output_embeddings().weight.dtype
