"""What a run reports: metrics, times, and the schedule that is printed at the start."""

import math
import time
from collections import defaultdict
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..functional import approx_kl, explained_variance, standard_deviation, variance
from ..models.actor_critic import SamplerRecorder
from ..models.adapter_switch import size_of
from .base import PPOTrainerBase
from .metrics import global_moments

# RLOO logs these of its own baseline and sequence-level KL; here they would be wrong or say the same twice.
RLOO_ONLY_METRICS = ("kl", "frac_reward_zero_std", "reward", "reward_std")


class ReportingMixin(PPOTrainerBase):
    """Metrics of [`PPOTrainer`]."""

    # ---- Metrics ----

    @contextmanager
    def _timed(self, phase: str):
        """Add the seconds spent here, and in no phase inside, to the phase."""
        start, outer = time.perf_counter(), self._inner_seconds
        self._inner_seconds = 0.0
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self._clock[phase] += seconds - self._inner_seconds
            self._inner_seconds = outer + seconds

    def _record_rollout(
        self, mode: str, logprobs: Tensor, k1: Tensor, scores: Tensor, ended: Tensor, mask: Tensor
    ) -> None:
        """Record what training and evaluation share; in evaluation without the rows that only fill the last batch."""
        stats, prefix, rows = self._stats[mode], self._metric_prefix, self._real_rows(len(scores))
        valid = ~scores.isnan() & rows
        lengths = torch.tensor([len(ids) for ids in self._completion_ids], device=scores.device, dtype=torch.float32)
        kl = (k1 * mask).sum(1)
        if self._has_reference:
            stats.add(f"{prefix}objective/kl", kl, valid)
            stats.add(f"{prefix}objective/kl_per_token", k1, mask * rows[:, None])
        stats.add(f"{prefix}objective/scores", scores, valid)
        stats.add(f"{prefix}objective/entropy", -(logprobs * mask).sum(1), valid)
        stats.add(f"{prefix}objective/num_unscored", self._total(~valid & rows))
        stats.add(f"{prefix}completions/length", lengths, rows)
        stats.add(f"{prefix}completions/terminated_length", lengths, rows & ended)
        stats.add(f"{prefix}completions/clipped_ratio", (~ended).float(), rows)
        per_func = self._local(self._rewards_per_func)
        for i, name in enumerate(self.reward_func_names):
            stats.add(f"{prefix}rewards/{name}", per_func[:, i], ~per_func[:, i].isnan() & rows)
        recorder = self.accelerator.unwrap_model(self.model).sampler_recorder
        if recorder is not None:
            difference, tokens = self._sampler_difference(recorder, logprobs, mask, rows)
            if not prefix:  # greedy decoding draws nothing
                stats.add("sampling/logprob_difference", difference, tokens)
        if mode == "train":
            self._episodes += len(scores) * self.accelerator.num_processes
            self._clock["tokens"] += self._total(lengths)
            stats.add("val/num_eos_tokens", self._total(ended))
            if self._has_reference and not self._critic_only:
                everyones = global_moments(self.accelerator, kl, valid)
                self._next_kl = (everyones[1].item(), int(everyones[0]))

    def _sampler_difference(self, recorder: SamplerRecorder, logprobs: Tensor, mask: Tensor, rows: Tensor):
        """Sampler's minus policy's log-prob of each token, nats: 0 on-policy, > 0 where the sampler truncates."""
        width = logprobs.size(1)
        drawn = [
            nn.functional.pad(chunk[:, :width], (0, max(0, width - chunk.size(1)))) for chunk in recorder.logprobs
        ]
        recorder.logprobs.clear()
        return torch.cat(drawn) - logprobs, mask * rows[:, None]

    def _record_objective(self, shaped: Tensor, kl: Tensor, rewards: Tensor, mask: Tensor) -> None:
        stats, valid = self._stats["train"], ~shaped.isnan()
        stats.add("objective/shaped_scores", shaped, valid)
        stats.add("objective/non_score_reward", -self.kl_controller.kl_coef * (kl * mask).sum(1), valid)
        stats.add("objective/rlhf_reward", rewards.sum(1), valid)
        stats.add("objective/kl_coef", self.kl_controller.kl_coef)
        if self._has_reference and not self._critic_only and self._next_kl[1]:
            self.kl_controller.update(*self._next_kl)

    @torch.no_grad()
    def _record_loss(self, logprobs, entropies, policy, policy_clipped, value, value_clipped, inputs) -> None:
        stats, mask = self._stats["train"], inputs["loss_mask"]
        log_ratio = logprobs - inputs["old_logprobs"]
        stats.add("policy/approxkl_avg", approx_kl(logprobs, inputs["old_logprobs"]), mask)
        stats.add("policy/clipfrac_avg", policy_clipped.float(), mask)
        stats.add("policy/entropy_avg", entropies, mask)
        stats.add("loss/policy_avg", policy, mask)
        stats.add("loss/value_avg", value, mask)
        stats.add("val/clipfrac_avg", value_clipped.float(), mask)
        stats.add("val/ratio", log_ratio.exp(), mask)

    def _total(self, rows: Tensor) -> float:
        return self.accelerator.reduce(rows.sum(dtype=torch.float32), reduction="sum").item()

    def _log_advantages(self, advantages: Tensor, mask: Tensor) -> None:
        """Put each row's mean advantage into the completions table, in place of RLOO's."""
        means = self.accelerator.gather((advantages * mask).sum(1) / mask.sum(1).clamp(min=1)).tolist()
        for _ in range(min(len(means), len(self._logs["advantages"]))):
            self._logs["advantages"].pop()
        self._logs["advantages"].extend(means)

    def _report(self, mode: str) -> dict[str, float]:
        moments = self._stats[mode].pop(self.accelerator)
        report: dict[str, float] = {}
        residuals, returns = moments.pop("_residuals", None), moments.pop("_returns", None)
        if residuals is not None and returns is not None and variance(returns) > 0:
            report["val/explained_variance"] = explained_variance(residuals, returns).item()
        for name, value in moments.items():
            count, mean, _, minimum, maximum = value.tolist()
            *prefix, topic = name.rsplit("completions/", 1)
            if prefix and topic.endswith("length"):
                for statistic, number in (("mean", mean), ("min", minimum), ("max", maximum)):
                    report[f"{prefix[0]}completions/{statistic}_{topic}"] = number if count else 0.0
            elif not count:
                continue
            elif "rewards/" in name:
                report |= {f"{name}/mean": mean, f"{name}/std": standard_deviation(value).item()}
            elif mode == "eval" and name.endswith("num_unscored"):
                report[name] = mean * count / self.accelerator.num_processes
            elif name == "policy/skipped_steps":
                report[name] = count / self.accelerator.num_processes
            else:
                report[name] = mean
            if name.endswith("objective/scores"):
                report[f"{name}_std"] = standard_deviation(value).item()
            if name == "val/ratio":
                report["val/ratio_var"] = variance(value).item()
        return report

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "train_loss" in logs:
            # An evaluation after the last step leaves the model in evaluation mode, and the steps since the last log
            # unlogged; and the Trainer divides the loss of the whole run by the steps since it was resumed
            self.model.train()
            logs["train_loss"] = self._total_loss_scalar / max(self.state.global_step, 1)
        if self.model.training:
            for name in RLOO_ONLY_METRICS:
                self._metrics["train"].pop(name, None)
            report = self._report("train") | {"episode": self._episodes}
            clock, self._clock = self._clock, defaultdict(float)
            tokens = clock.pop("tokens", 0.0)
            if tokens:
                report["tokens_per_second"] = tokens / max(sum(clock.values()), 1e-9)
            report |= {f"time/{phase}": seconds for phase, seconds in clock.items()}
            if start_time is not None:
                report["eps"] = (self._episodes - self._episodes_at_start) / max(time.time() - start_time, 1e-9)
            self._metrics["train"].update({name: [number] for name, number in report.items()})
        super().log(logs, start_time)

    def _print_schedule(self) -> None:
        args, actor_critic = self.args, self.model
        rollouts = len(self.train_dataset) * self.num_generations // args.batch_size
        steps_per_rollout = args.num_mini_batches * args.num_ppo_epochs
        steps = (
            args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * rollouts * steps_per_rollout)
        )
        policy = size_of(actor_critic.parameters_of("policy"))
        trained = size_of(p for p in actor_critic.parameters_of("policy") if p.requires_grad)
        critic = size_of(actor_critic.parameters_of("critic"))
        reference = (
            "none" if not self._has_reference else "frozen copy" if self.ref_model is not None else "adapter off"
        )
        self.accelerator.print(
            f"PPO: {len(self.train_dataset):,} prompts × {self.num_generations} responses; a rollout is "
            f"{args.batch_size:,} episodes = {args.num_mini_batches} minibatches of {args.mini_batch_size:,} "
            f"({args.per_device_train_batch_size} per device × {args.gradient_accumulation_steps} accumulated × "
            f"{args.world_size} processes), passed over {args.num_ppo_epochs} times = {steps_per_rollout} optimizer "
            f"steps.\n     {-(-steps // steps_per_rollout):,} rollouts, {steps:,} optimizer steps, "
            f"{-(-steps // steps_per_rollout) * args.batch_size:,} episodes; responses of up to "
            f"{self.max_completion_length} tokens, ended by "
            f"{self._tokenizer.convert_ids_to_tokens(self.eos_token_ids)}.\n"
            f"     policy {policy:,} parameters ({trained:,} trained), critic {critic:,} ({self._critic_origin}), "
            f"reference: {reference}; rewards: {', '.join(self.reward_func_names)}."
        )
