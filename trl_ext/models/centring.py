"""Centre the scores of a reward model at 0, even if its head has no bias."""

from typing import Any

import torch
from accelerate.utils import GatheredParameters
from datasets import Dataset
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor


def centring_shift(reference: Tensor, everything: Tensor, ridge: float = 1e-3) -> Tensor:
    """Return the head's weights v that score reference completions 1 on average, with the least variance over all.

    Most sequence classifiers have a head w without a bias, so the mean score m of the reference completions cannot be
    subtracted from a bias. The head w − m v scores the reference completions exactly 0 on average. Of all heads that
    do so, it changes margins least: min vᵀCv subject to vᵀμ = 1 has the solution v = C⁻¹μ / (μᵀC⁻¹μ).

    Args:
        reference: (M, D) inputs of the head for reference completions; μ is their mean.
        everything: (N, D) inputs of the head for completions of all kinds; C is their covariance.
        ridge: added to C's diagonal, as a multiple of the diagonal's mean. It matters if N is not much larger than D.

    Returns:
        (D,), float64.
    """
    covariance = everything.detach().double().T.cov()
    scale = covariance.diagonal().mean()
    mean = reference.detach().double().mean(0)
    if scale > 0:
        covariance += ridge * scale * torch.eye(len(covariance), dtype=torch.double)
        shift = torch.linalg.solve(covariance, mean)
    else:
        shift = mean  # all completions are equal, so no head's scores vary: take the smallest shift
    return shift / (shift @ mean)


def head_of(model: nn.Module) -> nn.Linear:
    """Return a classifier's head: its only linear layer that is trained and has one output."""
    layers = [each for each in model.modules() if isinstance(each, nn.Linear) and each.out_features == 1]
    (head,) = [layer for layer in layers if layer.weight.requires_grad]
    return head


@torch.no_grad()
def _features(trainer: Any, rows: list[list[int]]) -> Tensor:
    """Return the head's (N, D) inputs for N rows of token ids: the last token's state, or a pooled state."""
    model = trainer.accelerator.unwrap_model(trainer.model).eval()
    size = trainer.args.per_device_eval_batch_size
    pad = trainer.processing_class.pad_token_id
    seen = []
    result = []
    hook = head_of(model).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    for start in range(0, len(rows), size):
        chunk = {"input_ids": list(rows[start : start + size])}
        batch = trainer.processing_class.pad(chunk, padding_side="right", return_tensors="pt").to(trainer.args.device)
        model(**batch)
        hidden = seen.pop()
        if hidden.dim() == 3:  # as the classifier does, take the last token that is not the pad token
            positions = torch.arange(hidden.size(1), device=hidden.device)
            last = (positions * (batch["input_ids"] != pad)).argmax(1)
            hidden = hidden[torch.arange(len(last)), last]
        result.append(hidden.double().cpu())
    hook.remove()
    return torch.cat(result)


def _whole(parameter: Tensor) -> Tensor:
    """Return a parameter that FSDP2 may have sharded, whole."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


@torch.no_grad()
def _subtract(parameter: Tensor, value: Tensor) -> None:
    """Subtract a whole value, in place, from a parameter that FSDP2 may have sharded."""
    value = value.to(parameter.device, parameter.dtype).expand(parameter.shape).contiguous()
    if isinstance(parameter, DTensor):
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
    parameter -= value


def centre(trainer: Any, demonstrations: Dataset) -> tuple[dict[str, float], dict[str, Tensor]]:
    """
    Shift a reward model's scores so that demonstrations score 0 on average. The model is changed in place, not saved.

    Args:
        trainer: a `RewardTrainer` whose `train_dataset` and `eval_dataset`, of N held-out pairs, are tokenized
            (`chosen_ids`, `rejected_ids`).
        demonstrations: tokenized rows, whose `chosen_ids` are the demonstrations.

    Returns:
        Two dicts. The first has `demonstrations_mean` and `demonstrations_mean_before_centring`, the demonstrations'
        mean score after and before the shift, and `margin_change_by_centring`, the mean absolute change of a held-out
        pair's margin. The second has `chosen` and `rejected`, the (N,) scores of the held-out completions after the
        shift.
    """
    head = head_of(trainer.model)
    train = trainer.train_dataset[:2000]
    held_out = trainer.eval_dataset
    reference = _features(trainer, demonstrations["chosen_ids"])
    chosen = _features(trainer, held_out["chosen_ids"])
    rejected = _features(trainer, held_out["rejected_ids"])
    everything = torch.cat([reference, _features(trainer, train["chosen_ids"] + train["rejected_ids"])])

    def scores(seen: Tensor) -> Tensor:
        bias = 0 if head.bias is None else _whole(head.bias).item()
        return seen @ _whole(head.weight)[0].detach().double().cpu() + bias

    if isinstance(trainer.model, FSDPModule):  # else the head is a gathered copy, which is not what will be saved
        trainer.model.reshard()
    with GatheredParameters(list(head.parameters()), modifier_rank=0):  # else empty under ZeRO-3
        mean = scores(reference).mean()
        margins_before = scores(chosen) - scores(rejected)
        if head.bias is not None:
            _subtract(head.bias, mean)
        else:
            _subtract(head.weight, mean * centring_shift(reference, everything))
        centred = {"chosen": scores(chosen), "rejected": scores(rejected)}
        margins = centred["chosen"] - centred["rejected"]
        facts = {
            "demonstrations_mean": scores(reference).mean().item(),
            "demonstrations_mean_before_centring": mean.item(),
            "margin_change_by_centring": (margins - margins_before).abs().mean().item(),
        }
    return facts, centred
