"""Collect and report the metrics of a PPO run, which the algorithm itself does not read."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from ..functional import (
    effective_sample_size,
    empty_moments,
    explained_variance,
    kl_estimate,
    merge_moments,
    moments,
    standard_deviation,
    turn_starts,
    variance,
)
from ..upstream.statements import temporarily
from .rollout import Rollout

# GRPO logs these; for PPO they would be wrong, or repeat another metric
GRPO_ONLY_METRICS = ("kl", "frac_reward_zero_std", "reward", "reward_std")

_CUSTOM = "rollout_metrics: "  # marks the metrics that a subclass adds, which replace ours of the same name


class Accumulator:
    """Accumulate the moments of each metric's entries between two calls of `pop`."""

    def __init__(self):
        self._moments: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor | float, mask: Tensor | None = None) -> None:
        """Add the entries of `values` where `mask` is 1 (None: all entries) to the metric `name`."""
        values = torch.tensor(values, dtype=torch.float64) if isinstance(values, (int, float)) else values
        new = moments(values, mask)
        old = self._moments.get(name)
        if old is not None:
            new = merge_moments(torch.stack([old.to(new.device), new]))
        self._moments[name] = new

    def pop(self, accelerator: Accelerator) -> dict[str, Tensor]:
        """
        Return each metric's (5,) count, mean, M2, minimum and maximum over all processes, and delete the entries.

        M2 is the sum of squared deviations from the mean. All processes must call this together.
        """
        names = sorted(set(gather_object([*self._moments])))
        if not names:
            return {}
        empty = empty_moments(accelerator.device)
        local = torch.stack([self._moments.get(name, empty).to(empty) for name in names])
        parts = accelerator.gather(local[None]).cpu()  # (processes, metrics, 5)
        self._moments.clear()
        return {name: merge_moments(parts[:, i]) for i, name in enumerate(names)}

    def not_finite(self) -> list[str]:
        """Return the names of the metrics with a NaN or infinite entry on this process since the last `pop`."""
        return sorted(name for name, value in self._moments.items() if value[0] > 0 and not value[1:].isfinite().all())

    def state_dict(self) -> dict[str, Tensor]:
        return {name: value.cpu() for name, value in self._moments.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._moments = dict(state)


def global_moments(accelerator: Accelerator, values: Tensor, mask: Tensor | None = None) -> Tensor:
    """
    Return (count, mean, M2, min, max), a (5,) tensor, of the `values` of all processes where `mask` is 1 (None: of all
    values). M2 is the sum of squared deviations from the mean.
    """
    return merge_moments(accelerator.gather(moments(values, mask)[None]))


class PPOMetrics:
    """
    Collect the metrics of a run, and return them when the trainer logs.

    Args:
        reward_names: names of the reward functions, in the functions' order.
    """

    def __init__(self, accelerator: Accelerator, reward_names: list[str]):
        self.accelerator = accelerator
        self.reward_names = reward_names
        self.train = Accumulator()
        self.eval = Accumulator()
        self.episodes = self.episodes_at_start = 0  # completions of all processes: all, and when `train` was resumed
        self._seconds: dict[str, float] = defaultdict(float)  # spent in each phase since the last report
        self._inner_seconds = 0.0
        self._tokens = 0.0  # sampled by all processes since the last report

    # ---- Observing ----

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the `with` block's seconds to `phase`, except those of other phases that are timed inside the block."""
        start = time.perf_counter()
        outer = self._inner_seconds
        self._inner_seconds = 0.0
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self._seconds[phase] += seconds - self._inner_seconds
            self._inner_seconds = outer + seconds

    def untimed(self) -> AbstractContextManager:
        """Return a context whose time, such as that of an evaluation, is left out of the timings."""
        return temporarily(self, _seconds=defaultdict(float))

    def add_rollout(
        self,
        rollout: Rollout,
        scores: Tensor,
        kl: Tensor,
        rewards: Tensor,
        returns: Tensor,
        kl_coef: float,
    ) -> None:
        """
        Add a rollout to the metrics before it is trained on.

        Args:
            scores: (B,), normalised and clipped.
            kl: (B, T), nats, the KL estimate that the rewards' penalty uses.
            rewards: (B, T), score units, before whitening.
            returns: (B, T), score units.
            kl_coef: the coefficient that the rewards' penalty uses, score units per nat.
        """
        self._observe(self.train, rollout, torch.ones_like(rollout.finished))
        self.episodes += len(scores) * self.accelerator.num_processes
        self._tokens += self._total(rollout.lengths)
        self.train.add("val/num_eos_tokens", self._total(rollout.finished))
        self.train.add("objective/shaped_scores", scores, rollout.valid)
        self.train.add("objective/non_score_reward", -kl_coef * (kl * rollout.mask).sum(1), rollout.valid)
        self.train.add("objective/rlhf_reward", rewards.sum(1), rollout.valid)
        self.train.add("objective/kl_coef", kl_coef)
        if rollout.values is not None:
            self.train.add("_residuals", returns - rollout.values, rollout.mask)
            self.train.add("_returns", returns, rollout.mask)

    def add_custom(self, metrics: dict[str, float]) -> None:
        """Add the metrics that the trainer's `rollout_metrics` returned."""
        for name, value in metrics.items():
            self.train.add(_CUSTOM + name, value)

    def add_evaluation(self, rollout: Rollout, rows: Tensor) -> None:
        """
        Add a batch of an evaluation to the metrics.

        Args:
            rows: (B,), False for copies that only fill up the last batch.
        """
        self._observe(self.eval, rollout, rows)

    def _observe(self, stats: Accumulator, rollout: Rollout, rows: Tensor) -> None:
        """Add to `stats` what training and evaluation share, over the rows where `rows`, (B,) bool, is True."""
        mask = rollout.mask
        valid = rollout.valid & rows
        tokens = mask * rows[:, None]
        if rollout.ref_logprobs is not None:
            stats.add("objective/kl", (rollout.k1 * mask).sum(1), valid)
            stats.add("objective/kl_per_token", rollout.k1, tokens)
        stats.add("objective/scores", rollout.scores, valid)
        stats.add("objective/entropy", -(rollout.logprobs * mask).sum(1), valid)
        stats.add("objective/num_unscored", self._total(~rollout.valid & rows))
        stats.add("completions/length", rollout.lengths, rows)
        stats.add("completions/terminated_length", rollout.lengths, rows & rollout.finished)
        if rollout.tool_mask is not None:
            # Also the turns of rows that `mask_truncated_completions` leaves out
            stats.add("turns/mean", turn_starts(rollout.tool_mask).sum(1).float(), rows)
            assert rollout.tool_lengths is not None and rollout.repeats is not None
            stats.add("completions/tool_length", rollout.tool_lengths, rows)
            repeats = rollout.repeats
            stats.add("tools/repeated_frequency", repeats, ~repeats.isnan() & rows[:, None])
        for name, played in rollout.environments.items():
            stats.add(f"environment/{name}/return", rollout.scores, valid & played)
        stats.add("completions/clipped_ratio", (~rollout.finished).float(), rows)
        for name, rewards in zip(self.reward_names, rollout.rewards_per_func.unbind(1), strict=True):
            stats.add(f"rewards/{name}", rewards, ~rewards.isnan() & rows)
        if rollout.sampler_logprobs is not None:
            self.add_sampling(stats, rollout.sampler_logprobs, rollout.logprobs, tokens)

    @torch.no_grad()
    def add_update(
        self,
        logprobs: Tensor,
        entropies: Tensor,
        losses: tuple[Tensor, Tensor],
        log_ratio: Tensor,
        actions: Tensor,
        batch: dict[str, Tensor],
    ) -> None:
        """
        Add a micro-batch of a policy update to the metrics.

        Args:
            logprobs, entropies: (B, T), nats.
            losses: (B, T) losses, and a (B, T) mask of the tokens whose loss was clipped.
            log_ratio: (B, T), nats: the log-prob of each token's action minus the action's log-prob before the update.
                The action is the token or its whole turn.
            actions: (B, T), 1 = token at which an action starts. Losses and ratios count once for each action.
            batch: the micro-batch; only its `old_logprobs` and `loss_mask`, (B, T) each, are read.
        """
        stats = self.train
        mask = batch["loss_mask"]
        stats.add("policy/approxkl_avg", kl_estimate(logprobs, batch["old_logprobs"], "k2"), mask)
        stats.add("policy/clipfrac_avg", losses[1].float(), actions)
        stats.add("policy/entropy_avg", entropies, mask)
        stats.add("policy/entropy_std", *_completion_means(entropies, mask))
        stats.add("loss/policy_avg", losses[0], actions)
        stats.add("val/ratio", log_ratio.exp(), actions)

    @torch.no_grad()
    def add_critic_update(self, losses: tuple[Tensor, Tensor], mask: Tensor) -> None:
        """
        Add a micro-batch of a critic update to the metrics.

        Args:
            losses: (B, T) losses, and a (B, T) mask of the tokens whose loss was clipped.
            mask: (B, T), 1 = token that counts.
        """
        self.train.add("loss/value_avg", losses[0], mask)
        self.train.add("loss/value_std", *_completion_means(losses[0], mask))
        self.train.add("val/clipfrac_avg", losses[1].float(), mask)

    @torch.no_grad()
    def add_sampling(self, stats: Accumulator, sampler_logprobs: Tensor, logprobs: Tensor, mask: Tensor) -> None:
        """
        Compare the sampler's log-probs with those of training's forward pass (`logprobs`) where `mask` is 1; add
        their difference and the KL to `stats`. All are (B, T), log-probs in nats.
        """
        stats.add("sampling/logprob_difference", sampler_logprobs - logprobs, mask)
        stats.add("sampling/kl", kl_estimate(sampler_logprobs, logprobs, "k3"), mask)

    def add_importance_weights(self, rollout: Rollout, weights: Tensor, is_outside: Tensor, actions: Tensor) -> None:
        """
        Add a rollout's importance weights to the metrics, and the share of weights that a bound has changed.

        Args:
            weights: (B, T), or (B, 1) for whole completions. Only completions with a score count.
            is_outside: bool, the shape of weights, True where a bound has changed the weight.
            actions: (B, T), 1 = token at which an action starts. Weights of shape (B, T) count only there.
        """
        mask = actions if weights.shape == rollout.mask.shape else rollout.valid[:, None]
        self.train.add("sampling/importance_sampling_ratio", weights, mask)
        self.train.add("sampling/clipfrac", is_outside.float(), mask)

    def _total(self, rows: Tensor) -> float:
        """Return the sum of `rows` over all processes."""
        return self.accelerator.reduce(rows.sum(dtype=torch.float32), reduction="sum").item()

    # ---- Reporting ----

    def report(self, start_time: float | None = None) -> dict[str, float]:
        """
        Return the training metrics since the last report, and `episode`, the number of episodes so far.

        With `start_time`, the time at which `train` began, add the episodes per second since then (`eps`).
        """
        report = self.means("train") | {"episode": self.episodes}
        seconds = self._seconds
        self._seconds = defaultdict(float)
        if self._tokens:
            report["tokens_per_second"] = self._tokens / max(sum(seconds.values()), 1e-9)
        self._tokens = 0.0
        report |= {f"time/{phase}": spent for phase, spent in seconds.items()}
        if start_time is not None:
            report["eps"] = (self.episodes - self.episodes_at_start) / max(time.time() - start_time, 1e-9)
        return report

    def means(self, mode: str) -> dict[str, float]:
        """
        Return a dict of the metrics of `mode`, `"train"` or `"eval"`, over all processes and since the last call;
        delete their entries.
        """
        moments = (self.train if mode == "train" else self.eval).pop(self.accelerator)
        report: dict[str, float] = {}
        custom = {name.removeprefix(_CUSTOM): moments.pop(name) for name in [*moments] if name.startswith(_CUSTOM)}
        residuals = moments.pop("_residuals", None)
        returns = moments.pop("_returns", None)
        if residuals is not None and returns is not None and variance(returns) > 0:
            report["val/explained_variance"] = explained_variance(residuals, returns).item()
        for name, value in moments.items():
            count, mean, _, minimum, maximum = value.tolist()
            std = standard_deviation(value).item()
            if name.startswith("completions/") and name.endswith("length"):
                topic = name.removeprefix("completions/")
                for statistic, number in {"mean": mean, "std": std, "min": minimum, "max": maximum}.items():
                    report[f"completions/{statistic}_{topic}"] = number if count else 0.0
            elif not count:
                continue
            elif name.startswith("rewards/"):
                report |= {f"{name}/mean": mean, f"{name}/std": std}
            elif mode == "eval" and name == "objective/num_unscored":
                report[name] = mean * count / self.accelerator.num_processes
            elif name == "sampling/importance_sampling_ratio":
                report |= {f"{name}/mean": mean, f"{name}/min": minimum, f"{name}/max": maximum}
                report["sampling/ess"] = effective_sample_size(value).item()
            elif name in ("policy/entropy_std", "loss/value_std"):
                report[name] = std
            else:
                report[name] = mean
            if name in ("objective/scores", "objective/kl"):
                report[f"{name}_std"] = std
            if name == "sampling/logprob_difference":
                report[f"{name}_max"] = max(-minimum, maximum)
            if name == "val/ratio":
                report["val/ratio_var"] = variance(value).item()
        return report | {name: value[1].item() for name, value in custom.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"train": self.train.state_dict(), "episodes": self.episodes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.train.load_state_dict(state["train"])
        self.episodes = self.episodes_at_start = state["episodes"]


def _completion_means(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return two (B,) tensors: the mean over each completion's real tokens, and whether the completion has any."""
    lengths = mask.sum(1)
    return (values.detach() * mask).sum(1) / lengths.clamp(min=1), lengths > 0
