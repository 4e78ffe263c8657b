"""Evaluation by generating: each prompt answered once, sampled and greedy, without a trace in the training state."""

import copy
import random
from contextlib import contextmanager

import numpy as np
import torch
from accelerate.utils import set_seed
from torch import Tensor

from .base import PPOTrainerBase
from .inputs import check_evaluation_batch
from .reporting import RLOO_ONLY_METRICS


class EvaluationMixin(PPOTrainerBase):
    """`evaluate()` of [`PPOTrainer`]."""

    # ---- Evaluation ----

    @property
    def _metric_prefix(self) -> str:
        return "greedy/" if self._eval_rows is not None and not self._sampling else ""

    def _real_rows(self, size: int) -> Tensor:
        """(B,) False for rows that only complete the last batch on some process."""
        device = self.accelerator.device
        if self._eval_rows is None:
            return torch.ones(size, dtype=torch.bool, device=device)
        seen, total = self._eval_rows
        self._eval_rows = (seen + size * self.accelerator.num_processes, total)
        return seen + size * self.accelerator.process_index + torch.arange(size, device=device) < total

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None) -> tuple[None, None, None]:
        self._prepare_inputs(inputs)  # generates, scores and records; there is no loss to evaluate
        return None, None, None

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ):
        """Score each prompt once, sampled and greedy, and leave no trace in the training state."""
        check_evaluation_batch(self.args)
        dataset = dataloader.dataset
        rloo_metrics, clock = copy.deepcopy(self._metrics["eval"]), dict(self._clock)
        with self._untouched_rng():
            self._sampling, self._eval_rows = True, (0, len(dataset) * self.num_generations_eval)
            try:
                output = super().evaluation_loop(
                    dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
                )
                rloo = {name: np.array(values, float) for name, values in self._metrics["eval"].items()}
                user_metrics = {name: float(np.nanmean(v)) for name, v in rloo.items() if not np.isnan(v).all()}
                if self.args.eval_greedy:
                    with self._greedy():
                        self._sampling, self._eval_rows = False, (0, len(dataset))
                        super().evaluation_loop(
                            self.get_eval_dataloader(dataset),
                            f"{description} (greedy)",
                            metric_key_prefix=metric_key_prefix,
                        )
            finally:
                self._eval_rows = None
        self._clock.clear()
        self._clock.update(clock)  # what is logged is the time of training
        self._metrics["eval"] = rloo_metrics
        metrics = {
            name: value for name, value in user_metrics.items() if name not in (*RLOO_ONLY_METRICS, "num_tokens")
        }
        metrics |= self._report("eval")
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in metrics.items()})
        return output

    @contextmanager
    def _greedy(self):
        saved = self.num_generations_eval
        self.num_generations_eval = 1
        if self.use_vllm:
            temperature, self.vllm_generation.temperature = self.vllm_generation.temperature, 0.0
        else:
            config, self.generation_config = self.generation_config, copy.deepcopy(self.generation_config)
            self.generation_config.do_sample = False
            self.generation_config.update(temperature=1.0, top_p=1.0, top_k=50)
        try:
            yield
        finally:
            self.num_generations_eval = saved
            if self.use_vllm:
                self.vllm_generation.temperature = temperature
            else:
                self.generation_config = config

    @contextmanager
    def _untouched_rng(self):
        """Draw from a fixed seed, then go on as if nothing had been drawn."""
        python, numpy = random.getstate(), np.random.get_state()
        devices = [self.accelerator.device] if self.accelerator.device.type not in ("cpu", "mps") else []
        with torch.random.fork_rng(devices=devices, device_type=devices[0].type if devices else "cuda"):
            set_seed(self.args.seed, device_specific=True)
            try:
                yield
            finally:
                random.setstate(python)
                np.random.set_state(numpy)
