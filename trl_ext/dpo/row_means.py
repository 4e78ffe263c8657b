"""
Compute a trainer's evaluation metrics as means over rows or tokens, so that they do not depend on the batch size.
"""

import sys
from typing import Any

import torch
from accelerate.utils import gather
from torch import Tensor
from transformers.trainer_utils import has_length

from ..functional import empty_moments, merge_moments
from ..upstream.statements import temporarily


class RowMeans:
    """
    Compute a TRL trainer's evaluation metrics over all rows or tokens at once; a mixin.

    TRL averages the means of batches, so a smaller last batch counts too much. Here sums and counts are added over
    batches and processes, and divided once. A metric `min_…` or `max_…` is the minimum or maximum over all rows. The
    copies that fill up the last batch are left out, unless the data is a stream, rows are packed or `compute_metrics`
    is used. The name of a metric begins with the evaluation set's prefix, so that several sets do not overwrite each
    other's metrics.
    """

    _rows_per_example = 1  # 2 for pairs: the chosen ones, then the rejected ones
    _loss_terms: dict[str, float] = {}  # metrics that `compute_loss` leaves out of the loss, with their weights in it
    _mean_rows = 0.0  # of the micro-batches of an optimizer step
    _evaluated: dict[str, Tensor]
    _seen: int
    _metrics: dict[str, Any]
    accelerator: Any
    model: Any

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        batches, items = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        self._mean_rows = sum(len(batch["input_ids"]) for batch in batches) / max(len(batches), 1)
        return batches, items

    def _share_of_step(self, inputs: dict[str, Any]) -> float:
        """Return by what to multiply a micro-batch's loss, so that the step's loss is a mean over its rows."""
        is_step = self.model.training and self._mean_rows
        return len(inputs["input_ids"]) / self._mean_rows if is_step else 1.0

    def _tokens(self, inputs: dict[str, Any]) -> dict[str, int]:
        """Return, for each metric that is a mean over tokens, the number of these tokens in a batch."""
        return {}

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ):
        is_sized = has_length(dataloader.dataset)
        self._evaluated = {}
        self._seen = 0
        self._total = len(dataloader.dataset) if is_sized else sys.maxsize
        self._metrics["eval"].clear()
        output = super().evaluation_loop(  # type: ignore[misc]
            dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
        )
        names = sorted(self._evaluated)
        parts = gather(torch.stack([self._evaluated[name] for name in names])[None]).cpu()
        whole = {name: merge_moments(parts[:, i]) for i, name in enumerate(names)}
        at = {"min": 3, "max": 4}  # of `moments`
        means = {}
        for name, each in whole.items():
            kind, _, _ = name.partition("_")
            means[name] = each[at.get(kind, 1)].item()
        means["loss"] += sum(weight * means[name] for name, weight in self._loss_terms.items())
        output.metrics.update({f"{metric_key_prefix}_{name}": mean for name, mean in means.items()})
        return output

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        keeps_rows = "attention_mask" in inputs and prediction_loss_only  # else rows are packed, or returned
        size = len(inputs["input_ids"]) // self._rows_per_example
        first = self._seen + size * self.accelerator.process_index
        self._seen += size * self.accelerator.num_processes
        rows = min(max(self._total - first, 0), size) if keeps_rows else size
        for name, value in list(inputs.items()) if rows < size else []:
            if isinstance(value, Tensor) and value.ndim and len(value) in (size, size * self._rows_per_example):
                # A process with copies alone runs the model on one of them, since others may wait for it
                inputs[name] = torch.cat([part[: max(rows, 1)] for part in value.split(size)])
        # So TRL logs the mean over this process's rows, which are counted below
        local = {"gather": lambda value: value, "gather_for_metrics": lambda value: value}
        with temporarily(self.accelerator, **local):
            loss, *outputs = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc]
        tokens = self._tokens(inputs)
        for name, (*_, mean) in {"loss": [loss], **self._metrics["eval"]}.items():
            parts = [self._evaluated.get(name, empty_moments(self.accelerator.device))]
            if rows:  # count, mean, M2, minimum and maximum, see `moments`: TRL gives only the mean of the rows
                parts += [parts[0].new_tensor([tokens.get(name, rows), mean, 0, mean, mean])]
            self._evaluated[name] = merge_moments(torch.stack(parts))
        self._metrics["eval"].clear()
        return loss, *outputs
