"""Extend TRL's `DPOTrainer` by an adaptive β, and by a loss that uses margins, confidences and weights of pairs."""

import copy
import math
import os
from collections.abc import Callable
from typing import Any

import torch
import trl
from accelerate.utils import GatheredParameters, is_peft_model
from datasets import Dataset
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from ..data.pairs import SCORES, PairCollator, take_columns
from ..functional import (
    displaced,
    masked_sum,
    preference_drift,
    preference_logits,
    preference_loss,
    sequence_logprobs,
)
from ..models.generation import check_savable
from ..models.weights import check_tokenizer, keep_4bit_layout, unpatched_copy, weights_identity
from ..upstream.names import check_contract, get_config_model_id, is_deepspeed_zero3_enabled
from ..upstream.statements import temporarily
from .config import DPOConfig
from .controllers import DriftController, MarginNormalizer, Pairs
from .stages import RecordedRun, checked

STATE_FILE = "dpo_state.pt"
REFERENCE_FILE = "dpo_reference.pt"


class DPOTrainer(RecordedRun, trl.DPOTrainer):
    """
    Train by Direct Preference Optimization (2305.18290) as TRL's trainer does, with more settings, see [`DPOConfig`].

    These settings can adapt β, bring the margins of all sources to one scale, and make the loss use a margin, a
    confidence and a weight of each pair.

    Args:
        model (`str`, [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Policy: a path or an object. For the path of an adapter, the base that it names is loaded, and the adapter
            is trained further.
        ref_model ([`~transformers.PreTrainedModel`], *optional*):
            Reference. The default is, as in TRL, the model at the policy's path; with a new adapter (`peft_config`)
            the model without it; and with an adapter that is trained further, a frozen copy of that adapter. For a
            policy that was built in memory it is a frozen copy of the policy.
        args ([`DPOConfig`], *optional*):
            Configuration.
        train_dataset, eval_dataset:
            Rows with `prompt`, `chosen` and `rejected`, and the columns that the settings read.
        data_collator, processing_class, compute_metrics, callbacks, optimizers, quantization_config, peft_config:
            As in TRL.
    """

    _tag_names = ["trl", "dpo", "trl-ext"]

    args: DPOConfig
    beta: Any
    data_collator: Any
    loss_weights: list[float]
    precompute_ref_logps: bool

    def __init__(
        self,
        model: Any,
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
    ):
        check_contract(DPOTrainer)
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = DPOConfig(f"{name.split('/')[-1] or 'model'}-DPO")
        margin = ["margin"] if "margin" in (getattr(train_dataset, "column_names", None) or ()) else [*SCORES]
        read = {"confidence": args.use_confidence, "weight": args.use_weight}
        read["source"] = args.margin_normalization == "source"
        self._pair_columns = (*(margin if args.use_margin else ()), *(name for name in read if read[name]))
        self._has_own_reference = ref_model is not None
        is_full = isinstance(model, nn.Module) and peft_config is None and not is_peft_model(model)
        if (
            ref_model is None
            and not args.precompute_ref_log_probs
            and is_full
            and not get_config_model_id(model.config)
        ):
            # Without a path, TRL could not load the reference
            ref_model = unpatched_copy(model, "the reference").requires_grad_(False).eval()

        super().__init__(
            model,
            args,
            ref_model=ref_model,
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
        check_savable(self.model)
        if self.processing_class is self._tokenizer:  # a processor's image tokens need no row of the embeddings
            check_tokenizer(self.model, self._tokenizer)
        for each in filter(None, (self.model, self.ref_model)):
            keep_4bit_layout(each)
        self.beta_controller: DriftController | None = None
        if args.beta_controller == "drift":
            if args.drift_horizon is None and not isinstance(train_dataset, Dataset):
                raise ValueError(
                    "`beta_controller='drift'` needs `drift_horizon`, in pairs, if the train dataset is a stream."
                )
            self.beta_controller = DriftController(args, args.drift_horizon or len(self.train_dataset))
        self.margin_normalizer: MarginNormalizer | None = None
        sources: list[str] = []
        if args.margin_normalization == "source":
            sources = sorted(self.train_dataset.unique("source"))
            self.margin_normalizer = MarginNormalizer(sources, args.margin_warmup_pairs)
        if self._pair_columns:
            codes = {source: i for i, source in enumerate(sources)}
            self.data_collator = PairCollator(self.data_collator, self._pair_columns, codes)

    # ---- The algorithm ----

    _rows_per_example = 2

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        share = self._share_of_step(inputs)
        weights = zip(self.loss_types, self.loss_weights, strict=True)
        with temporarily(self, loss_weights=[w if kind == "sft" else w * share for kind, w in weights]):
            return super().compute_loss(model, inputs, *args, **kwargs)

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool) -> Any:
        """Return TRL's loss with the β of each pair; with `return_outputs`, the loss and the outputs."""
        if not self.args.reads_log_probs and "sft" not in self.loss_types:
            result = super()._compute_loss(model, inputs, return_outputs)
        else:
            columns, batch = take_columns(inputs)
            batch |= self._reference_logps(batch)
            ours, others = self._split_loss_weights()
            seen: list[Tensor] = []

            # TRL's loss runs the model, then reads β: in between, `_observe_pairs` sets it
            def tapped(**kwargs: Any) -> Any:
                outputs = model(**kwargs)
                if kwargs.get("fused_lm_head"):  # else TRL asks for the logits alone, for `compute_metrics`
                    seen.append(self._observe_pairs(batch, columns, ours, outputs.log_probs))
                return outputs

            # `precompute_ref_logps`: TRL then reads the reference's log-probs from the batch, which now has them.
            # Within the block, `self.beta` may hold a β for each pair; after it, `self.beta` is a number again
            with temporarily(self, beta=self.beta, loss_weights=others, precompute_ref_logps=True):
                result = super()._compute_loss(tapped, batch, return_outputs)
            (loss,) = seen
            result = (result[0] + loss, result[1]) if return_outputs else result + loss
        logged = self._metrics["train" if self.model.training else "eval"]
        if logged["rewards/margins"][-1] == logged["rewards/accuracies"][-1] == 0:  # all are ties
            logged["rewards/accuracies"][-1] = 0.5
        # TRL has gathered the margin, so either all processes raise, or none does
        if self.model.training and not math.isfinite(logged["rewards/margins"][-1]):
            raise FloatingPointError(
                f"At step {self.state.global_step}, log-probs of the policy or the reference are not finite. Lower "
                "the learning rate or `max_grad_norm`, or train in bf16 or float32 instead of fp16."
            )
        return result

    def _observe_pairs(
        self,
        batch: dict[str, Tensor],  # TRL's, with the reference's (B,) log-probs
        columns: dict[str, Tensor],  # (B,) each: `margin`, `confidence`, `weight`, `source`, if the settings use them
        weights: dict[str, float],  # of the losses `sigmoid` and `sft`; 0 for one that TRL computes
        log_probs: Tensor,  # (2B, T), nats, under the policy, chosen completions first
    ) -> Tensor:
        """Set the pairs' β from their log-ratios; return the weighted sum of the losses that replace TRL's."""
        pairs = self._log_ratios(log_probs, batch, columns)
        everyones = pairs.gathered(self.accelerator)

        beta = self.beta
        if self.model.training:
            if self.beta_controller is not None:
                self.beta_controller.observe(everyones)
            if self.margin_normalizer is not None:
                self.margin_normalizer.observe(everyones)
        factors = 1.0 if self.margin_normalizer is None else self.margin_normalizer.factors_of(pairs.sources)
        self.beta = beta * factors  # what TRL reads next

        offset = self.args.margin_scale * columns["margin"] if "margin" in columns else None
        logits = preference_logits(pairs.chosen, pairs.rejected, self.beta, offset, self.args.dpop_lambda)
        losses = preference_loss(logits, columns.get("confidence"))
        loss = weights["sigmoid"] * (columns.get("weight", 1.0) * losses).mean()
        if weights["sft"]:  # a mean over the tokens of the optimizer step; TRL's is over those of a micro-batch
            nll = -masked_sum(*(x.chunk(2)[0] for x in _completion(log_probs, batch)))
            if self.model.training:  # gradients are averaged over micro-batches and processes
                loss = loss + weights["sft"] * nll / self._mean_chosen_tokens
            else:
                count = max(self._tokens(batch)["nll_loss"], 1)
                self._metrics["eval"]["nll_loss"].append(nll.item() / count)

        if self.args.reads_log_probs:
            self._record(beta, everyones)
        return loss

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:  # the last micro-batch of an optimizer step
            if self.beta_controller is not None:
                self.beta = self.beta_controller.step(self.beta)
            if self.margin_normalizer is not None:
                self.margin_normalizer.step()
        return loss

    # ---- Its parts ----

    def _reference_logps(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return the reference's (B,) log-probs, nats, by TRL's column names; {} if the batch has them already."""
        if self.precompute_ref_logps:
            return {}
        chosen, rejected = self.compute_ref_log_probs(self.reference, batch)
        return {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}

    def _split_loss_weights(self) -> tuple[dict[str, float], list[float]]:
        """Return the weights of our `sigmoid` and `sft`; and TRL's list of weights, 0 for what is computed here."""
        weights = list(zip(self.loss_types, self.loss_weights, strict=True))
        replaced = {"sft", "sigmoid"} if self.args.replaces_sigmoid else {"sft"}
        ours = {
            name: sum(w for kind, w in weights if kind == name and name in replaced) for name in ("sigmoid", "sft")
        }
        return ours, [0.0 if kind in replaced else weight for kind, weight in weights]

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        batches, items = super().get_batch_samples(*args, **kwargs)
        if "sft" in self.loss_types:
            tokens = sum(self._tokens(batch)["nll_loss"] for batch in batches) / max(len(batches), 1)
            local = torch.tensor(tokens, dtype=torch.float32, device=self.accelerator.device)
            self._mean_chosen_tokens = self.accelerator.reduce(local, reduction="mean").clamp(min=1e-9)
        return batches, items

    def _tokens(self, inputs: dict[str, Any]) -> dict[str, int]:
        chosen, rejected = (int(each.sum()) for each in inputs["completion_mask"][:, 1:].chunk(2))
        of_chosen = dict.fromkeys(("nll_loss", "logits/chosen", "mean_token_accuracy"), chosen)
        return of_chosen | {"logits/rejected": rejected, "entropy": chosen + rejected}

    @property
    def _loss_terms(self) -> dict[str, float]:  # type: ignore[override]
        return {"nll_loss": self._split_loss_weights()[0]["sft"]} if "sft" in self.loss_types else {}

    def _log_ratios(self, log_probs: Tensor, batch: dict[str, Tensor], columns: dict[str, Tensor]) -> Pairs:
        """Return the log-ratios of B pairs; the arguments are those of `_observe_pairs`."""
        chosen, rejected = sequence_logprobs(*_completion(log_probs, batch), self.ld_alpha).chunk(2)
        no_source = torch.full_like(chosen, -1, dtype=torch.long)
        return Pairs(
            chosen - batch["ref_chosen_logps"],
            rejected - batch["ref_rejected_logps"],
            columns.get("source", no_source),
        )

    def _record(self, beta: float, pairs: Pairs) -> None:
        """Log the loss's β, with a normalizer also each source's, and what the (N,) pairs of all processes show."""
        report = {
            "beta": beta,
            "logps/chosen_delta": pairs.chosen.mean().item(),
            "logps/displacement_rate": displaced(pairs.chosen, pairs.rejected).float().mean().item(),
            "logps/drift": preference_drift(pairs.chosen, pairs.rejected).mean().item(),
        }
        if self.margin_normalizer is not None:
            names = self.margin_normalizer.sources
            factors = self.margin_normalizer.factors[:-1]
            report |= {f"beta/{name}": b for name, b in zip(names, (beta * factors).tolist(), strict=True)}
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, value in report.items():
            metrics[name].append(value)

    # ---- Data ----

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        if not isinstance(eval_dataset, str):  # a string names a dataset checked before
            eval_dataset = checked(eval_dataset, "eval", self._pair_columns)
        return super().evaluate(eval_dataset, *args, **kwargs)

    # ---- Reference ----

    @property
    def reference(self) -> nn.Module:
        """
        Return the model that gives the reference's log-probs: `ref_model`, or if there is none, the PEFT policy, with
        its adapter `ref` or none.
        """
        return self.model if self.ref_model is None else self.ref_model

    def compute_ref_log_probs(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        _, batch = take_columns(inputs)
        return super().compute_ref_log_probs(model, batch)

    # ---- Training and resuming ----

    def _run_facts(self) -> dict[str, Any]:
        facts = super()._run_facts()
        if self.margin_normalizer is not None:
            facts["sources"] = self.margin_normalizer.sources
        if self._has_own_reference:
            facts["reference"] = weights_identity(self.accelerator.unwrap_model(self.ref_model))
        return facts

    def _save_own_state(self, checkpoint: str) -> None:
        if self.args.sync_ref_model:  # all processes gather its weights
            reference = self.accelerator.get_state_dict(self.ref_model)
            if self.args.should_save:
                torch.save(reference, os.path.join(checkpoint, REFERENCE_FILE))
        state: dict[str, Any] = {} if self.beta_controller is None else {"beta": self.beta, "set": self.args.beta}
        if self.margin_normalizer is not None:
            state["source"] = self.margin_normalizer.state_dict()
        if state and self.args.should_save:  # the same on all processes
            torch.save(state, os.path.join(checkpoint, STATE_FILE))

    def _load_own_state(self, checkpoint: str) -> None:
        if self.args.sync_ref_model:
            reference = self.accelerator.unwrap_model(self.ref_model)
            weights = torch.load(os.path.join(checkpoint, REFERENCE_FILE), map_location="cpu", weights_only=True)
            if not is_deepspeed_zero3_enabled():
                set_model_state_dict(reference, weights, options=StateDictOptions(full_state_dict=True))
            else:
                with GatheredParameters(list(reference.parameters()), modifier_rank=0):
                    if self.accelerator.is_main_process:
                        reference.load_state_dict(weights)
        path = os.path.join(checkpoint, STATE_FILE)
        # What the checkpoint lacks, since settings have changed, restarts
        state = torch.load(path, map_location="cpu", weights_only=True) if os.path.isfile(path) else {}
        if self.beta_controller is not None and state.get("set") == self.args.beta:
            self.beta_controller.restart()
            self.beta = state["beta"]
        if self.margin_normalizer is not None and "source" in state:
            self.margin_normalizer.load_state_dict(state["source"])


def _completion(log_probs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the (2B, T) log-probs of the batch's tokens, and the mask of its completions' tokens."""
    mask = batch["completion_mask"][:, 1:]
    # Prompt tuning puts virtual tokens before the others
    return log_probs[:, -mask.shape[1] :], mask
