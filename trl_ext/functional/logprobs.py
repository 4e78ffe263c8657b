"""Compute log-probs and entropies in the memory of the logits, which are a language model's largest tensor."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_TILE = {"cpu": 2**19}  # numbers in a tile: a few rows that stay in the processor's cache
_TILE_ELSEWHERE = 2**24  # enough for one launch


def logprobs_and_entropies(
    logits: Tensor, labels: Tensor, temperature: float = 1.0, with_entropies: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Compute the log-probs of labels and the entropies of the distributions, **overwriting the logits**.

    With logits x and z = x / temperature: log p = z - log sum_v exp(z_v), and H = -sum_v p_v log p_v. The gradients
    are d log p_y / dx = (1[y] - p) / temperature and dH / dx = -p (log p + H) / temperature. Sums are in float32, or
    in float64 if the logits are; the rows are computed a tile at a time.

    Do not read the logits afterwards: the forward pass may write into them, and the backward pass turns them into
    their own gradient. If the operation that made the logits keeps them for its own backward pass (tanh does), a copy
    is overwritten instead. If any other operation keeps them, autograd raises in the backward pass. The backward pass
    can be run only once.

    Args:
        logits: (..., V).
        labels: (...), ids in [0, V).
        temperature: divides the logits.
        with_entropies: whether to compute entropies.

    Returns:
        The log-probs (...), nats, in the dtype of the sums; and the entropies (...), in the same unit and dtype, or
        None if `with_entropies` is False.
    """
    if hasattr(logits.grad_fn, "_saved_result"):  # as tanh, whose backward pass reads its output
        logits = logits.clone()
    rows = logits.reshape(-1, logits.size(-1)), labels.reshape(-1, 1)
    logprobs, entropies = _InPlace.apply(*rows, temperature, with_entropies)
    return logprobs.view(labels.shape), entropies.view(labels.shape) if with_entropies else None


class _InPlace(torch.autograd.Function):
    """Compute (N, 1) log-probs of (N, 1) labels, and entropies if asked for, without a copy of the (N, V) logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, temperature: float, with_entropies: bool) -> Any:
        ctx.set_materialize_grads(False)  # an entropy that is only logged costs no backward pass
        dtype = torch.promote_types(logits.dtype, torch.float32)
        logprobs = logits.new_empty(len(logits), 1, dtype=dtype)
        log_sums = torch.empty_like(logprobs)
        entropies = torch.empty_like(logprobs) if with_entropies else None
        # `detach` hides the writing from autograd, but autograd notices if another operation's saved input has changed
        for i, tile in _tiles(logits.detach()):
            z = tile - tile.amax(-1, keepdim=True).to(dtype)
            if temperature != 1:
                z /= temperature
            logprobs[i] = z.gather(-1, labels[i])
            # The logits become exp(z - max z), here or below, which the backward pass replaces by their gradient
            exp = torch.exp(z, out=tile) if tile.dtype == dtype else z.exp()
            log_sums[i] = sums = exp.sum(-1, keepdim=True)
            if entropies is not None:
                entropies[i] = torch.linalg.vecdot(exp, z)[:, None].div_(sums)
            if tile.dtype != dtype and ctx.needs_input_grad[0]:
                tile.copy_(exp)
        log_sums.log_()
        logprobs -= log_sums
        if entropies is not None:
            torch.sub(log_sums, entropies, out=entropies)
        ctx.temperature = temperature
        ctx.save_for_backward(logits, labels, logprobs, log_sums, entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None) -> Any:
        logits, labels, logprobs, log_sums, entropies = ctx.saved_tensors
        logits = logits.detach()
        by_logprob = torch.zeros_like(logprobs) if grad_logprobs is None else grad_logprobs / ctx.temperature
        by_entropy = None if grad_entropies is None else grad_entropies / ctx.temperature
        normalizer = log_sums.neg().exp_()
        tiny = torch.finfo(logprobs.dtype).tiny
        # dx = -p (g + h (log p + H)), with p = exp / sum
        for i, tile in _tiles(logits):
            exp = tile.to(log_sums.dtype)
            factor = by_logprob[i]
            if by_entropy is not None:  # clamped, to stay finite where p is 0
                log_p = exp.clamp(min=tiny).log_().sub_(log_sums[i])
                factor = log_p.add_(entropies[i]).mul_(by_entropy[i]).add_(factor)
            tile.copy_(exp.mul_(factor * -normalizer[i]))
        at_labels = -torch.expm1(logprobs) * by_logprob
        if by_entropy is not None:
            at_labels -= logprobs.exp() * (logprobs + entropies) * by_entropy
        # Computed apart, since 1 - p is 0 in bfloat16 where p is near 1
        return logits.scatter_(-1, labels, at_labels.to(logits.dtype)), None, None, None


def _tiles(rows: Tensor) -> Any:
    """Split (N, V) rows into tiles that are computed one by one; yield each tile's slice, and its rows."""
    size = max(1, _TILE.get(rows.device.type, _TILE_ELSEWHERE) // rows.size(-1))
    for start in range(0, len(rows), size):
        yield slice(start, start + size), rows[start : start + size]
