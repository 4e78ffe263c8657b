"""Adapt the learning rate, so that the updates on a rollout move the policy by a given KL."""

import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from ..functional import learning_rate_factor, step_kl


class StepSums(NamedTuple):
    """
    Hold sums over a minibatch of all processes: the two of [`step_kl_sums`], |advantage|, and the completions' number.
    """

    kl: float
    choices: float
    advantage: float
    completions: float


class StepScaler:
    """
    Multiply the learning rates of an optimizer's steps, or take steps back.

    Only the optimizer sees the scaled rates, and only during its step: the schedule and checkpoints keep the unscaled
    rates.
    """

    def __init__(self, factor: Callable[[], float]):
        self.factor = factor  # returns that of the next step
        self.last_factor = 1.0  # of the last optimizer step
        self.undone: list[int] = []  # steps taken back, the next one's last; empty for a normal step
        self.step = 0  # number of the next one in its rollout
        self.was_skipped = False  # the last step, by fp16's loss scaler
        self.optimizer: Any = None
        self._scheduled: list[float] = []  # rates of the groups, during a step
        self._rates: dict[int, list[float]] = {}  # those that each step had

    def attach(self, optimizer: Any) -> None:
        """Scale the steps of an optimizer, wrapped by the accelerator or not."""
        while hasattr(optimizer, "optimizer"):  # accelerate's wrapper, DeepSpeed's
            optimizer = optimizer.optimizer
        if optimizer is not self.optimizer:
            self.optimizer = optimizer
            optimizer.register_step_pre_hook(self._before)
            optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: Any, *_: Any) -> None:  # ZeRO-3 calls it several times in a step
        self.was_skipped = bool(getattr(optimizer, "found_inf", False))  # set for fused optimizers, which skip it
        groups = optimizer.param_groups
        self._scheduled = [group["lr"] for group in groups]
        if not self.undone:
            self.last_factor = self.factor()
            self._rates[self.step] = [rate * self.last_factor for rate in self._scheduled]
            for group, rate in zip(groups, self._rates[self.step], strict=True):
                group["lr"] = rate
            return
        for group, rate in zip(groups, self._rates[self.undone[-1]], strict=True):
            # Without a gradient Adam repeats its last step, each time β₁ times as large
            group["lr"] = -rate / group["betas"][0] ** len(self.undone)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.zero_()

    def _after(self, optimizer: Any, *_: Any) -> None:
        for group, rate in zip(optimizer.param_groups, self._scheduled, strict=True):
            group["lr"] = rate

    @property
    def can_undo(self) -> bool:
        """Return whether the optimizer repeats its last step if it gets no gradient."""
        name = type(self.optimizer).__name__
        momentum = self._first_group.get("betas", (0.0,))[0]
        return "Adam" in name and "NAdam" not in name and "Free" not in name and momentum > 0

    @property
    def schedule(self) -> float:
        """Return the present scheduled learning rate divided by the initial one; 1 without a schedule."""
        group = self._first_group
        return group["lr"] / group["initial_lr"] if group.get("initial_lr") else 1.0

    @property
    def _first_group(self) -> dict[str, Any]:
        return self.optimizer.param_groups[0] if self.optimizer is not None else {}


class LearningRateController:
    """
    Scale the learning rates so that the updates on each rollout move the policy by a KL of about `target`.

    While the schedule is at a share s of the initial rate, the target is s · `target`.

    Args:
        target: KL in nats per choice; 0 leaves the rates as they are. A choice is a token that the policy was not
            certain of, as [`step_kl_sums`] counts it in the first pass over a rollout.
        episodes: number of episodes n in a rollout, all processes. The target is multiplied by n/64 if n < 64, since
            the gradient is then noisier; by n/128 if n > 128, but at most by 2.
        kl_limit: largest KL at which a rollout's updates should end, in nats per completion. It lowers the target
            where completions have many choices.
        minibatches: number of minibatches in a rollout; the KL is measured over the last that many.
    """

    FIRST_FACTOR = 0.1  # a first step at a rate that is far too high would be seen only afterwards
    BOUNDS = (0.01, 1000.0)  # of the factor
    RISE = 1.5  # largest of the factor in a rollout, once the target was in reach
    # A step is undone if after it a minibatch's `kl` is above OVERSHOOT times its target and this; a token that the
    # policy no longer samples adds 2, the most that one can. (docs/studies/step_size.md, "Does a run fall?")
    OVERSHOOT = 4.0
    DROPPED_KL = 4.0

    def __init__(self, target: float, episodes: int = 64, kl_limit: float = math.inf, minibatches: int = 1):
        self.target = target * min(episodes / 64, max(1.0, episodes / 128), 2.0)
        self.kl_limit = kl_limit
        self.minibatches = minibatches
        self.factor = self.FIRST_FACTOR if target else 1.0
        self.requested_scale = 1.0  # by callbacks
        self.was_near_target = False  # whether the target was in reach
        self.ceiling = math.inf  # of the factor in this rollout
        self.is_on = True  # off where the policy is not trained
        self.scaler = StepScaler(lambda: self.factor_in_use)
        self._choices = 0.0  # of a completion, in the first pass
        self._sums: list[StepSums] = []  # of this rollout's minibatches
        self._used: list[float] = []  # factors of its steps; 0 for those that were taken back, and for taking back

    @property
    def factor_in_use(self) -> float:
        if not self.is_on:
            return 1.0
        return self.factor if self.target else self.requested_scale

    def scale(self, factor: float) -> None:
        """
        Multiply the learning rates by a factor that a callback requested.

        If the rates follow a KL `target`, multiply the target by factor² instead.
        """
        self.requested_scale *= factor

    @property
    def present_target(self) -> float:
        """Return the KL at which the rollout's updates should end, in nats per choice; 0 if rates are not adapted."""
        return self._full_target * self.scaler.schedule * self.requested_scale**2

    @property
    def _full_target(self) -> float:
        """Return `present_target` as it is before a schedule or a callback lowers it."""
        return min(self.target, self.kl_limit / max(self._choices, 1e-6))

    def observe(self, sums: StepSums, taken: int, steps: int) -> float:
        """
        Update the factor by the KL of the rollout's optimizer steps so far, and return this KL, nats per choice.

        Args:
            sums: of the next minibatch, after `taken` steps. If its `advantage` is 0, the KL says nothing about the
                rates, and the factor stays.
            taken: number of steps taken on the rollout so far.
            steps: number of all steps on the rollout.
        """
        del self._used[taken:], self._sums[taken:]
        if not taken:
            self.ceiling = self.factor * self.RISE if self.was_near_target else math.inf
        if self.scaler.was_skipped and self._used:
            self._used[-1] = 0.0
        self.scaler.was_skipped = self.scaler.optimizer is not None  # unless the next step is taken
        kept = [step for step, factor in enumerate(self._used) if factor]
        if kept and taken < steps and self._went_too_far(sums):
            self._take_back(kept[-1])
            sums = self._sums[kept[-1]]  # the policy is about as it was then
        else:
            self.scaler.undone = []
        self._sums.append(sums)
        sums_so_far = torch.tensor(self._sums, dtype=torch.float64)
        # Later passes find fewer choices where the policy has learned which to take: that must not slow it down
        _, choices, _, completions = sums_so_far[: self.minibatches].sum(0)
        self._choices = float(choices / completions.clamp(min=1e-6))
        kls, _, _, completions = sums_so_far[-self.minibatches :].T  # one minibatch would be noisy
        moved = torch.tensor([0.0, *accumulate(self._used)][-len(kls) :], dtype=torch.float64)
        kl = step_kl(kls, self._choices * completions, moved)
        target = self.present_target
        if target and moved[-1] and sums.advantage > 0:
            factor = learning_rate_factor(self.factor, sum(self._used) / taken, kl, target, taken / steps)
            lowest, highest = self.BOUNDS
            self.factor = max(lowest, min(factor, highest, self.ceiling))
            self.was_near_target |= kl > target / 4
        self.scaler.step = len(self._used)
        self._used.append(0.0 if self.scaler.undone else self.factor)
        return kl

    def _went_too_far(self, sums: StepSums) -> bool:
        """Return whether the last step must be undone, since the policy has dropped tokens that it was certain of."""
        target = max(self.present_target, self._full_target / 10)  # where a schedule ends, rounding would count
        limit = self.OVERSHOOT * target * self._choices * sums.completions + self.DROPPED_KL
        return bool(self.target and self.scaler.can_undo and sums.kl > limit)

    def _take_back(self, step: int) -> None:
        """Let the next optimizer step undo an earlier one, and halve its factor as a limit until the rollout ends."""
        if not self.scaler.undone:
            self.ceiling = min(self.ceiling, self._used[step] / 2)
        self.scaler.undone.append(step)
        self._used[step] = 0.0
        self.factor = min(self.factor, self.ceiling)

    def rescale(self, ratio: float) -> None:
        """After a change of the learning rate, multiply the factor by old ÷ new, so that steps stay as large."""
        if self.target:
            self.factor *= ratio

    def state_dict(self) -> dict[str, Any]:
        names = "factor", "requested_scale", "was_near_target", "target"
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.requested_scale = state["requested_scale"]
        if self.target and state["target"]:  # a run without a target has found no factor
            self.factor, self.was_near_target = state["factor"], state["was_near_target"]
