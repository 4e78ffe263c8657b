"""Centre the scores of a reward model at 0, even if its head has no bias."""

import json
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import GatheredParameters
from datasets import Dataset
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from ..evaluation.reward_model import plot_margins, reward_model_report
from ..runs.files import write_text


def centring_shift(reference: Tensor, everything: Tensor, ridge: float = 1e-3) -> Tensor:
    """Return weights v of a head with mean score 1 on reference answers and the least variance over all answers.

    To centre scores at 0, the mean score m of the reference answers could be subtracted from the head's bias; but most
    sequence classifiers have a head w without a bias. The head w − m v scores the reference answers exactly 0 on
    average, and of all heads that do so, it changes margins least: min vᵀCv subject to vᵀμ = 1 has the solution
    v = C⁻¹μ / (μᵀC⁻¹μ).

    Args:
        reference: (M, D) inputs of the head for reference answers; μ is their mean.
        everything: (N, D) inputs of the head for answers of all kinds; C is their covariance.
        ridge: added to C's diagonal, in units of the diagonal's mean. It matters if N is not much larger than D.

    Returns:
        (D,), float64.

    Raises:
        ValueError: the shapes are not (M, D) and (N, D).
    """
    if reference.ndim != 2 or everything.ndim != 2 or reference.shape[1] != everything.shape[1]:
        raise ValueError(
            f"reference and everything must be (M, D) and (N, D), got {tuple(reference.shape)} and "
            f"{tuple(everything.shape)}: pass one row for each answer"
        )
    covariance = everything.detach().double().T.cov()
    scale, mean = covariance.diagonal().mean(), reference.detach().double().mean(0)
    if scale > 0:
        covariance += ridge * scale * torch.eye(len(covariance), dtype=torch.double)
        shift = torch.linalg.solve(covariance, mean)
    else:
        shift = mean  # all answers are equal, so no head's scores vary: take the smallest shift
    return shift / (shift @ mean)


def head_of(model: nn.Module) -> nn.Linear:
    """
    Return a classifier's head, its only trained linear layer with one output.

    Raises:
        ValueError: there is no such layer, or more than one.
    """
    heads = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == 1 and m.weight.requires_grad]
    if len(heads) != 1:
        raise ValueError(
            f"{type(model).__name__} has {len(heads)} trained linear layers with one output; it must have exactly one "
            "such layer"
        )
    return heads[0]


@torch.no_grad()
def _features(trainer: Any, rows: list[list[int]]) -> Tensor:
    """
    Return the head's input for each row of token ids, (N, D): a decoder's state at the last token, or an encoder's
    pooled state.
    """
    model, size = trainer.accelerator.unwrap_model(trainer.model).eval(), trainer.args.per_device_eval_batch_size
    pad = trainer.processing_class.pad_token_id
    seen, result = [], []
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
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


@torch.no_grad()
def _subtract(parameter: Tensor, value: Tensor) -> None:
    value = value.to(parameter.device, parameter.dtype).expand(parameter.shape).contiguous()
    if isinstance(parameter, DTensor):
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
    parameter -= value


def centre(trainer: Any, demonstrations: Dataset) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """
    Shift the model's scores so that demonstrations score 0 on average, then evaluate the model; save nothing.

    Returns:
        Two values: a report on the shifted model, see [`reward_model_report`]; and its (N,) scores of the answers of
        held-out pairs, `chosen` and `rejected`.
    """
    head, train, held_out = head_of(trainer.model), trainer.train_dataset[:2000], trainer.eval_dataset
    reference = _features(trainer, demonstrations["chosen_ids"])
    chosen, rejected = _features(trainer, held_out["chosen_ids"]), _features(trainer, held_out["rejected_ids"])
    everything = torch.cat([reference, _features(trainer, train["chosen_ids"] + train["rejected_ids"])])
    gaps = [len(a) - len(b) for a, b in zip(held_out["chosen_ids"], held_out["rejected_ids"], strict=True)]

    def scores(seen: Tensor) -> Tensor:
        bias = 0 if head.bias is None else _whole(head.bias).item()
        return seen @ _whole(head.weight)[0].detach().double().cpu() + bias

    if isinstance(trainer.model, FSDPModule):  # else the head is a gathered copy, which is not what will be saved
        trainer.model.reshard()
    with GatheredParameters(list(head.parameters()), modifier_rank=0):  # else empty under ZeRO-3
        mean, margins_before = scores(reference).mean(), scores(chosen) - scores(rejected)
        if head.bias is not None:
            _subtract(head.bias, mean)
        else:
            _subtract(head.weight, mean * centring_shift(reference, everything))
        centred = scores(chosen), scores(rejected)
        margins = centred[0] - centred[1]
        report = {
            **reward_model_report(*centred, torch.tensor(gaps)),
            "demonstrations_mean": scores(reference).mean().item(),
            "demonstrations_mean_before_centring": mean.item(),
            "margin_change_by_centring": (margins - margins_before).abs().mean().item(),
        }
    return report, {"chosen": centred[0], "rejected": centred[1]}


def write_scores(scores: dict[str, Tensor], output_dir: Path) -> None:
    """Write the scores of both answers of each held-out pair to `held_out_scores.json`, and plot `margins.png`."""
    plot_margins(scores["chosen"] - scores["rejected"], output_dir / "margins.png")
    write_text(output_dir / "held_out_scores.json", json.dumps({name: each.tolist() for name, each in scores.items()}))
