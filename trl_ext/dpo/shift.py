"""Measure whether pairs come from another model: compare their log-probs with those of the reference's samples."""

import warnings
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from ..models.generation import completion_logprobs, eos_token_ids, sample, seeded


def distribution_shift(trainer: Any, pairs: int) -> dict[str, float]:
    """
    Compare the answers of training pairs with answers that the reference samples to the same prompts.

    All processes must call this. The states of random generators do not change.

    Args:
        trainer: a [`DPOTrainer`] before its first step.
        pairs: how many rows to compare, over all processes.

    Returns:
        A dict with the mean log-prob per token under the reference, nats, of the `chosen`, the `rejected` and the
        `sampled` answers; and with `chosen_below_sampled`, the share of chosen answers whose log-prob per token lies
        below the 1st percentile of that of the sampled answers.
    """
    rows = _draw(trainer.train_dataset, pairs, trainer.args.seed)
    accelerator, size = trainer.accelerator, trainer.args.per_device_eval_batch_size
    mine = rows[accelerator.process_index :: accelerator.num_processes]
    reference = accelerator.unwrap_model(trainer.reference)
    ends = eos_token_ids(reference, trainer._tokenizer)
    seed = trainer.args.seed + accelerator.process_index
    was_training = reference.training
    reference.eval()
    with seeded(seed, accelerator.device), trainer.reference_adapter(), accelerator.autocast():
        local = [
            row
            for start in range(0, len(mine), size)
            for row in _mean_logprobs(reference, mine[start : start + size], ends, trainer.args.max_length).tolist()
        ]
    reference.train(was_training)
    everything = torch.tensor(gather_object(local), dtype=torch.double)
    means = dict(zip(("chosen", "rejected", "sampled"), everything.mean(dim=0).tolist(), strict=True))
    below = everything[:, 0] < everything[:, 2].quantile(0.01)
    return {**means, "chosen_below_sampled": below.double().mean().item()}


def warn_of_shift(shift: dict[str, float], bound: float) -> None:
    """Warn if `chosen_below_sampled`, in the result `shift` of [`distribution_shift`], is above the share `bound`."""
    if shift["chosen_below_sampled"] <= bound:
        return
    warnings.warn(
        f"{shift['chosen_below_sampled']:.0%} of the chosen answers have a lower mean log-prob per token under the "
        f"reference than 99 % of the reference's own samples (bound: {bound:.0%}). Means in nats: chosen "
        f"{shift['chosen']:.2f}, rejected {shift['rejected']:.2f}, samples {shift['sampled']:.2f}. Another model or "
        "another prompt format probably made these pairs, and DPO learns less from them. Weigh pairs by their "
        "log-probs (`use_weighting=True`, WPO), fine-tune on the chosen answers first, or collect pairs from this "
        "model (`trl-ext online-dpo`).",
        UserWarning,
        stacklevel=3,
    )


def _draw(dataset: Any, count: int, seed: int) -> list[dict[str, Any]]:
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))
    rows = dataset.select(order[:count].tolist())
    return rows.select_columns(["prompt_ids", "chosen_ids", "rejected_ids"]).to_list()


def _mean_logprobs(model: Any, rows: list[dict[str, Any]], ends: list[int], max_length: int | None) -> Tensor:
    """Return (B, 3) mean log-probs per token, nats: of each row's chosen, rejected and sampled answer."""
    prompts = [row["prompt_ids"] for row in rows]
    answers = [[row[name] for row in rows] for name in ("chosen_ids", "rejected_ids")]
    longest = max(len(ids) for column in answers for ids in column)
    if max_length is not None:
        longest = min(longest, max_length - max(map(len, prompts)))
    longest = max(longest, 1)
    answers.append(sample(model, prompts, ends, max_new_tokens=longest))
    means = []
    for column in answers:
        logprobs, mask = completion_logprobs(model, prompts, [ids[:longest] for ids in column])
        means.append(logprobs.sum(1) / mask.sum(1).clamp(min=1))
    return torch.stack(means, dim=1)
