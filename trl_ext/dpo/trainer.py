"""DPO on TRL's `DPOTrainer`: log-probs pass a tap, which sets β and collects what the loss and the metrics need."""

import contextlib
import copy
import math
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import trl
from accelerate.utils import gather_object, is_peft_model
from datasets import Dataset
from torch import Tensor, nn
from transformers.trainer_utils import TrainOutput

from ..control import AgreedControl
from ..functional import displaced, preference_drift, preference_logits, preference_loss, sequence_logprobs
from ..upstream import get_config_model_id, use_adapter
from .beta_controller import BetaController
from .config import DPOConfig, refuse_old_arguments
from .inputs import (
    PAIR_COLUMNS,
    PairCollator,
    check_dataset,
    check_evaluation,
    check_model,
    name_row,
    wanted_columns,
)
from .margin_normalizer import MarginNormalizer
from .reference import frozen_copy, needs_copy
from .shift import check_shift_is_possible, distribution_shift, warn_of_shift

STATE_FILE = "dpo_state.pt"


class DPOTrainer(AgreedControl, trl.DPOTrainer):
    """
    Direct Preference Optimization (2305.18290) on TRL's trainer, with a β that adapts, margins of all sources on one
    scale, what else is known of a pair in its loss, and displacement in the metrics. See [`DPOConfig`].

    Args:
        model (`str`, [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Policy: a path or an object.
        ref_model ([`~transformers.PreTrainedModel`], *optional*):
            Reference. If not given, as in TRL: the model at the policy's path, or with PEFT the model without its
            adapter; for a policy that was built in memory, a frozen copy.
        args ([`DPOConfig`], *optional*):
            Configuration.
        train_dataset, eval_dataset:
            Rows with `prompt`, `chosen` and `rejected`, and the columns that the options read.
        data_collator, processing_class, compute_metrics, callbacks, optimizers, quantization_config, peft_config:
            As in TRL.
    """

    _tag_names = ["trl", "dpo", "trl-ext"]

    args: DPOConfig
    beta: Any
    data_collator: Any
    loss_weights: list[float]
    precompute_ref_logps: bool
    _signature_columns: Any

    def __init__(
        self,
        model: Any = None,
        ref_model: Any = None,
        args: DPOConfig | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Callable | None = None,
        callbacks: list | None = None,
        optimizers: tuple = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        **old: Any,
    ):
        refuse_old_arguments(old)
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = DPOConfig(f"{name.split('/')[-1] or 'model'}-DPO")
        check_model(model, args, processing_class)
        if train_dataset is None:
            raise ValueError("`train_dataset` is required.")
        columns = wanted_columns(args, train_dataset)
        train_dataset = check_dataset(train_dataset, "train", args, columns)
        if eval_dataset is not None:
            eval_dataset = check_evaluation(eval_dataset, args, columns)
        if ref_model is None and not args.precompute_ref_log_probs and needs_copy(model, peft_config):
            ref_model = frozen_copy(model)

        super().__init__(
            model=model,
            ref_model=ref_model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=copy.deepcopy(peft_config),  # PEFT writes into it
        )
        if args.distribution_shift_samples:
            check_shift_is_possible(self)
        pairs_per_batch = args.per_device_train_batch_size * args.world_size
        if args.beta_controller == "beta_dpo" and pairs_per_batch < 8:
            warnings.warn(
                f"`beta_controller='beta_dpo'` sets β from the margins of a micro-batch, here only {pairs_per_batch} "
                "pairs of all processes: raise `per_device_train_batch_size` to 8 or more instead of accumulating "
                "gradients.",
                UserWarning,
                stacklevel=2,
            )
        self._pair_columns = columns
        horizon = args.drift_horizon
        if horizon is None:
            horizon = len(self.train_dataset) if isinstance(self.train_dataset, Dataset) else math.inf
        self.beta_controller = BetaController(args, horizon)
        self.margin_normalizer: MarginNormalizer | None = None
        codes: dict[str, int] = {}
        if args.margin_normalization == "source":
            sources = sorted(self.train_dataset.unique("source"))
            codes = {source: i for i, source in enumerate(sources)}
            self.margin_normalizer = MarginNormalizer(sources, args.margin_warmup_pairs)
        if self._pair_columns:
            self.data_collator = PairCollator(self.data_collator, self._pair_columns, codes)
        self.distribution_shift: dict[str, float] | None = None

    # ---- Data ----

    def _set_signature_columns_if_needed(self) -> None:
        is_new = self._signature_columns is None
        super()._set_signature_columns_if_needed()
        if is_new:
            self._signature_columns = [*self._signature_columns, *self._pair_columns]

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        if eval_dataset is not None and not isinstance(eval_dataset, str):  # a name of one that was checked
            eval_dataset = check_evaluation(eval_dataset, self.args, self._pair_columns)
        return super().evaluate(eval_dataset, *args, **kwargs)

    # ---- Loss ----

    def compute_ref_log_probs(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return super().compute_ref_log_probs(model, {k: v for k, v in inputs.items() if k not in PAIR_COLUMNS})

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool) -> Any:
        if self.args.reads_log_probs:
            result = self._compute_tapped_loss(model, inputs, return_outputs)
        else:
            result = super()._compute_loss(model, inputs, return_outputs)
        # TRL has gathered these, so all processes raise or none does
        if not math.isfinite(self._metrics["train" if self.model.training else "eval"]["rewards/margins"][-1]):
            self._raise_not_finite(model, inputs)
        return result

    def _compute_tapped_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool) -> Any:
        columns = {name: inputs[name] for name in PAIR_COLUMNS if name in inputs}
        inputs = {name: value for name, value in inputs.items() if name not in columns}
        if not self.precompute_ref_logps:
            chosen, rejected = self.compute_ref_log_probs(self._reference, inputs)
            inputs |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        losses: list[Tensor] = []
        self.beta_controller.beta = self.beta  # as TRL's, it may be set from outside

        def tap(**kwargs: Any) -> Any:
            outputs = model(**kwargs)
            if kwargs.get("fused_lm_head"):  # else TRL only wants the logits, for `compute_metrics`
                losses.append(self._on_log_probs(outputs.log_probs, inputs, columns))
            return outputs

        beta, precomputed, weights = self.beta, self.precompute_ref_logps, self.loss_weights
        self.precompute_ref_logps = True
        if self.args.replaces_sigmoid:  # ours takes the place of TRL's
            self.loss_weights = [
                0.0 if kind == "sigmoid" else weight for kind, weight in zip(self.loss_types, weights, strict=True)
            ]
        try:
            result = super()._compute_loss(tap, inputs, return_outputs)
        finally:
            self.beta, self.precompute_ref_logps, self.loss_weights = beta, precomputed, weights
        self.beta = self.beta_controller.beta
        if not self.args.replaces_sigmoid:
            return result
        weight = sum(w for kind, w in zip(self.loss_types, weights, strict=True) if kind == "sigmoid")
        loss = (result[0] if return_outputs else result) + weight * losses[0]
        return (loss, result[1]) if return_outputs else loss

    def _on_log_probs(self, log_probs: Tensor, inputs: dict[str, Any], columns: dict[str, Tensor]) -> Tensor:
        """Set the β that TRL is about to read, and return our preference loss, which counts if it replaces TRL's."""
        mask = inputs["completion_mask"][:, 1:]
        logps = sequence_logprobs(log_probs[:, -mask.shape[1] :], mask, self.ld_alpha)
        chosen, rejected = logps.chunk(2)
        chosen, rejected = chosen - inputs["ref_chosen_logps"], rejected - inputs["ref_rejected_logps"]
        training, codes = self.model.training, columns.get("source")

        seen = [chosen.detach().float(), rejected.detach().float()]
        if codes is not None:
            seen.append(codes.to(seen[0].dtype))
        everyones = self.accelerator.gather(torch.stack(seen, dim=1)).cpu()
        all_chosen, all_rejected = everyones[:, 0], everyones[:, 1]
        kept = self.beta_controller.observe(all_chosen, all_rejected) if training else None
        beta: Tensor | float = self.beta_controller.beta
        if self.margin_normalizer is not None and codes is not None:
            if training:
                self.margin_normalizer.observe(all_chosen - all_rejected, everyones[:, 2].long())
            beta = beta * self.margin_normalizer.factors.to(codes.device)[codes]
        self.beta = beta
        self._record(all_chosen, all_rejected)

        weights = torch.ones_like(chosen) if (weight := columns.get("weight")) is None else weight
        if kept is not None:  # the mean over the kept pairs, as a weighted mean over all
            start = self.accelerator.process_index * len(chosen)
            mine = kept[start : start + len(chosen)].to(weights)
            weights = weights * mine * (len(kept) / kept.sum().item())
        offset = columns.get("margin")
        if "score_chosen" in columns:
            offset = columns["score_chosen"] - columns["score_rejected"]
        if offset is not None:
            offset = self.args.margin_scale * offset
        logits = preference_logits(chosen, rejected, beta, offset, self.args.dpop_lambda)
        return (weights * preference_loss(logits, columns.get("confidence"))).mean()

    def _record(self, chosen: Tensor, rejected: Tensor) -> None:
        """Log what (N,) log-ratios of all processes show."""
        report = {
            "beta": self.beta_controller.beta,
            "logps/chosen_delta": chosen.mean().item(),
            "logps/displacement_rate": displaced(chosen, rejected).float().mean().item(),
            "logps/drift": preference_drift(chosen, rejected).mean().item(),
        }
        if self.margin_normalizer is not None:
            effective = (self.beta_controller.beta * self.margin_normalizer.factors).tolist()
            report |= {
                f"beta/{source}": beta for source, beta in zip(self.margin_normalizer.sources, effective, strict=False)
            }
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, value in report.items():
            metrics[name].append(value)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:
            self.beta_controller.step()
            self.beta = self.beta_controller.beta
            if self.margin_normalizer is not None:
                self.margin_normalizer.step()
        return loss

    # ---- Reference ----

    @property
    def _reference(self) -> nn.Module:
        """What the reference pass runs; with PEFT, under another adapter or none."""
        return self.model if self.ref_model is None else self.ref_model

    def reference_adapter(self) -> contextlib.AbstractContextManager:
        """Within, `model` is the reference where there is no `ref_model`."""
        if self.ref_model is not None or not is_peft_model(self.model):
            return contextlib.nullcontext()
        model = self.accelerator.unwrap_model(self.model)
        return use_adapter(model, "ref" if "ref" in model.peft_config else None)

    # ---- Training and resuming ----

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        if self.args.distribution_shift_samples and not resume_from_checkpoint:
            shift = distribution_shift(self, self.args.distribution_shift_samples)
            self.distribution_shift = shift
            for name, value in shift.items():  # shown by the first log
                self._metrics["train"][f"shift/{name}"].append(value)
            if self.is_world_process_zero():
                warn_of_shift(shift, self.args.distribution_shift_bound)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self._has_state and self.args.should_save:  # the same on all processes
            state = {"beta_controller": self.beta_controller.state_dict()}
            if self.margin_normalizer is not None:
                state["margin_normalizer"] = self.margin_normalizer.state_dict()
            torch.save(state, os.path.join(output_dir, STATE_FILE))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or not self._has_state:
            return
        path = os.path.join(checkpoint, STATE_FILE)
        if not os.path.isfile(path):
            raise ValueError(
                f"{path} is missing: the checkpoint was written without `beta_controller` and `margin_normalization`, "
                "or with `save_only_model=True`, so the β to go on with is not known. Use the settings of the "
                "interrupted run, or start anew."
            )
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.beta_controller.load_state_dict(state["beta_controller"])
        self.beta = self.beta_controller.beta
        if (self.margin_normalizer is None) != ("margin_normalizer" not in state):
            raise ValueError(
                f"{path} was written with another `margin_normalization` than {self.args.margin_normalization!r}: use "
                "the settings of the interrupted run, or start anew."
            )
        if self.margin_normalizer is not None:
            self.margin_normalizer.load_state_dict(state["margin_normalizer"])

    @property
    def _has_state(self) -> bool:
        return self.args.beta_controller != "fixed" or self.margin_normalizer is not None

    # ---- Mistakes ----

    @torch.no_grad()
    def _raise_not_finite(self, model: nn.Module, inputs: dict[str, Any]) -> None:
        """Find the rows whose log-probs are not finite, on all processes, and name them."""
        inputs = {name: value for name, value in inputs.items() if name not in PAIR_COLUMNS}
        seen: list[Tensor] = []

        def tap(**kwargs: Any) -> Any:
            outputs = model(**kwargs)
            seen.append(outputs.log_probs)
            return outputs

        super()._compute_loss(tap, inputs, False)
        if self.precompute_ref_logps:
            reference = torch.cat([inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]])
        else:
            reference = torch.cat(self.compute_ref_log_probs(self._reference, inputs))
        found = [
            f"process {self.accelerator.process_index}: the {whose} log-prob of the "
            f"{'chosen' if row < len(reference) // 2 else 'rejected'} answer of {name_row(self, inputs, row)}"
            for whose, logps in (("policy's", seen[0].sum(1)), ("reference's", reference))
            for row in (~logps.isfinite()).nonzero()[:, 0].tolist()
        ]
        found = gather_object(found)
        raise FloatingPointError(
            f"At step {self.state.global_step}, log-probs are not finite: {'; '.join(found[:4])}"
            f"{f'; and {len(found) - 4} more' if len(found) > 4 else ''}. Look at these rows if they are few; else "
            "lower the learning rate, set `max_grad_norm`, or train in bf16 or float32 instead of fp16."
        )
