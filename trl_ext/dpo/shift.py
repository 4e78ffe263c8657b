"""Tell whether the reference would have written the answers: compare their log-probs with those of its own."""

import warnings
from itertools import islice
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from .inputs import PairCollator


def check_shift_is_possible(trainer: Any) -> None:
    """Raise where the reference cannot sample answers: this has not been run."""
    reason = None
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        reason = "sampling from a reference that FSDP or DeepSpeed has sharded is not supported"
    elif trainer._is_vision_dataset:
        reason = "images are not supported"
    if reason:
        raise ValueError(
            f"`distribution_shift_samples={trainer.args.distribution_shift_samples}`: {reason}. Set it to 0."
        )


@torch.no_grad()
def distribution_shift(trainer: Any, pairs: int) -> dict[str, float]:
    """
    Compare the answers of the training pairs with answers that the reference samples to the same prompts.

    All processes take part. The state of the random number generators is left as it was.

    Args:
        trainer: a [`DPOTrainer`] before its first step.
        pairs: rows to compare, of all processes.

    Returns:
        Mean log-prob per token under the reference of the `chosen`, the `rejected` and the `sampled` answers, nats,
        and `chosen_below_sampled`, the share of chosen answers below the 1st percentile of the sampled ones.
    """
    rows = _draw(trainer.train_dataset, pairs, trainer.args.seed)
    accelerator, size = trainer.accelerator, trainer.args.per_device_eval_batch_size
    mine = rows[accelerator.process_index :: accelerator.num_processes]
    reference = trainer.reference
    was_training, ld_alpha = reference.training, trainer.ld_alpha
    devices = [accelerator.device] if accelerator.device.type not in ("cpu", "mps") else []
    trainer.ld_alpha = None  # lengths count in full here
    parts: list[Tensor] = []
    try:
        reference.eval()
        with torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cuda"):
            torch.manual_seed(trainer.args.seed + accelerator.process_index)
            for start in range(0, len(mine), size):
                chunk = mine[start : start + size]
                samples = _sample(trainer, reference, chunk)
                own = [{**row, "rejected_ids": ids} for row, ids in zip(chunk, samples, strict=True)]
                chosen, rejected = _per_token(trainer, reference, chunk)
                parts.append(torch.stack([chosen, rejected, _per_token(trainer, reference, own)[1]], dim=1))
    finally:
        trainer.ld_alpha = ld_alpha
        reference.train(was_training)
    local = torch.cat(parts) if parts else torch.empty(0, 3, device=accelerator.device)
    everything = accelerator.pad_across_processes(local, pad_index=torch.nan)
    everything = accelerator.gather(everything).double().cpu()
    everything = everything[~everything.isnan().all(dim=1)]
    means = dict(zip(("chosen", "rejected", "sampled"), everything.mean(dim=0).tolist(), strict=True))
    below = everything[:, 0] < everything[:, 2].quantile(0.01)
    return {**means, "chosen_below_sampled": below.double().mean().item()}


def warn_of_shift(shift: dict[str, float], bound: float) -> None:
    """Warn if the share of chosen answers that the reference would not write is above `bound`."""
    if shift["chosen_below_sampled"] <= bound:
        return
    warnings.warn(
        f"{shift['chosen_below_sampled']:.0%} of the chosen answers are less likely under the reference than 99 % of "
        f"its own answers (bound: {bound:.0%}); log-prob per token: chosen {shift['chosen']:.2f}, rejected "
        f"{shift['rejected']:.2f}, its own {shift['sampled']:.2f} nats. Such pairs were written by another model or "
        "under another prompt format, and DPO learns less from them. Weigh pairs by their likelihood "
        "(`use_weighting=True`, WPO), fine-tune on the chosen answers first, or collect pairs from this model "
        "(recipes/online_dpo.py).",
        UserWarning,
        stacklevel=3,
    )


def _draw(dataset: Any, count: int, seed: int) -> list[dict[str, Any]]:
    if not isinstance(dataset, Dataset):
        return list(islice(dataset, count))
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))
    rows = dataset.select(order[:count].tolist())
    return rows.select_columns(["prompt_ids", "chosen_ids", "rejected_ids"]).to_list()


def _sample(trainer: Any, reference: Any, rows: list[dict[str, Any]]) -> list[list[int]]:
    """One answer of the reference to each prompt, not longer than the longest answer to be compared with."""
    prompts = trainer._tokenizer.pad(
        {"input_ids": [row["prompt_ids"] for row in rows]}, padding_side="left", return_tensors="pt"
    ).to(trainer.accelerator.device)
    longest = max(len(row[name]) for row in rows for name in ("chosen_ids", "rejected_ids"))
    if trainer.args.max_length is not None:
        longest = min(longest, trainer.args.max_length - max(len(row["prompt_ids"]) for row in rows))
    with trainer.reference_adapter(), trainer.accelerator.autocast():
        sequences = trainer.accelerator.unwrap_model(reference).generate(
            input_ids=prompts["input_ids"],
            attention_mask=prompts["attention_mask"],
            max_new_tokens=max(longest, 1),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=trainer._tokenizer.eos_token_id,
            pad_token_id=trainer._tokenizer.pad_token_id,
        )
    completions = sequences[:, prompts["input_ids"].shape[1] :]
    is_eos = completions == trainer._tokenizer.eos_token_id
    lengths = (is_eos.cumsum(1) - is_eos.long() == 0).sum(1)  # up to the first EOS, that included
    return [row[:length].tolist() for row, length in zip(completions, lengths, strict=True)]


def _per_token(trainer: Any, reference: Any, rows: list[dict[str, Any]]) -> tuple[Tensor, ...]:
    """(B,) mean log-prob per token of the chosen and of the rejected answers, nats."""
    collator = trainer.data_collator
    batch = (collator.collator if isinstance(collator, PairCollator) else collator)(rows)
    batch = {name: value.to(trainer.accelerator.device) for name, value in batch.items()}
    lengths = batch["completion_mask"][:, 1:].sum(1).chunk(2)
    sums = trainer.compute_ref_log_probs(reference, batch)
    return tuple(total / length.clamp(min=1) for total, length in zip(sums, lengths, strict=True))
