"""Hold what PPO adapts from rollout to rollout: KL coefficient, learning rate, critic's weight, normalised rewards."""

import math
from itertools import accumulate
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers.utils import logging

from ..functional import (
    adaptive_kl_coef,
    critic_weight,
    empty_moments,
    learning_rate_factor,
    merge_moments,
    moments,
    variance,
    whiten,
    whitening_scale,
)
from ..upstream.names import is_conversational
from .config import PPOConfig
from .reward_calls import score_rollouts
from .rollout import sequence_scores

logger = logging.get_logger(__name__)


class KLController:
    """
    Hold `kl_coef`, the coefficient of the KL penalty.

    With `kl_controller: adaptive` it changes after each rollout that trains the policy, so that the KL moves towards
    `kl_target` (Ziegler et al., 1909.08593). Otherwise it is constant. In both cases a callback may scale it.
    """

    def __init__(self, args: PPOConfig):
        self.args = args
        self.kl_coef = args.kl_coef
        self._maximum = math.inf if args.kl_coef_max is None else args.kl_coef_max

    def update(self, kl: float, n_episodes: int) -> None:
        """
        Change the coefficient after a rollout, if the controller is adaptive.

        Args:
            kl: `objective/kl` of the rollout, nats summed over a completion, mean over all processes' completions
                with a score.
            n_episodes: number of these completions.
        """
        if self.args.kl_controller == "adaptive":
            self.kl_coef = adaptive_kl_coef(
                self.kl_coef,
                kl,
                self.args.kl_target,
                n_episodes,
                self.args.kl_horizon,
                minimum=self.args.kl_coef_min,
                maximum=self._maximum,
            )

    def scale(self, factor: float) -> None:
        """Multiply the coefficient by a factor that a callback requested; the result is at most `kl_coef_max`."""
        if factor == 1.0:
            return
        self.kl_coef = min(self.kl_coef * factor, self._maximum)
        if self.kl_coef == 0:
            logger.warning(
                "A callback asked to change `kl_coef`, but no factor changes `kl_coef=0`. Set a positive `kl_coef`."
            )

    def state_dict(self) -> dict[str, Any]:
        adapts = self.args.kl_controller == "adaptive"
        return {"kl_coef": self.kl_coef, "start": self.args.kl_coef, "adapts": adapts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        now = self.state_dict()
        if (state["start"], state["adapts"]) == (now["start"], now["adapts"]):  # else the new settings count
            self.kl_coef = state["kl_coef"]


class LearningRateController:
    """
    Scale the learning rates so that the updates on each rollout move the policy by a KL of about `target`.

    Only the optimizer sees the scaled rates, and only during its step: the schedule and checkpoints keep the unscaled
    rates. While the schedule is at a share s of the initial rate, the target is s² · `target`.

    Args:
        target: KL in nats per choice; 0 leaves the rates as they are. A choice is a token that the policy was not
            certain of, as [`step_kl_sums`] counts it.
        episodes: number of episodes n in a rollout, all processes. The target is multiplied by n/64 if n < 64, since
            the gradient is then noisier; by n/128 if n > 128, but at most by 2.
        kl_limit: largest KL at which a rollout's updates should end, in nats per completion. It lowers the target
            where completions have many choices.
        minibatches: number of minibatches in a rollout; the KL is measured over the last that many.
    """

    FIRST = 0.1  # a first step at a rate that is far too high would be seen only afterwards
    BOUNDS = (0.01, 1000.0)
    # Both are measured in docs/studies/step_size.md, "Does a run fall?". A KL in the second half of a rollout that is
    # OVERSHOOT times what it should be there sets a ceiling: half of the largest factor of this rollout
    OVERSHOOT = 4.0
    # A step is undone if after it a minibatch's first sum is above OVERSHOOT times its target and this; a token that
    # the policy no longer samples adds 2
    DROPPED = 4.0
    # A row is used for a KL ÷ what it should be above its first number. The second is the largest rise of the factor
    # in a rollout, once the target has been in reach; the third is the rise of the ceiling. The last row is the most
    # careful: a policy that does not move at all may be certain of everything
    RISES = ((0.25, 1.5, 1.02), (0.01, 2.0, 1.1), (-math.inf, 1.1, 1.02))

    def __init__(self, target: float, episodes: int = 64, kl_limit: float = math.inf, minibatches: int = 1):
        self.target = target * min(episodes / 64, max(1.0, episodes / 128), 2.0)
        self.kl_limit = kl_limit
        self.minibatches = minibatches
        self._choices = 0.0  # of a completion, in the last pass
        self.factor = self.FIRST if target else 1.0
        self.requested_scale = 1.0  # by callbacks
        self.was_near_target = False  # whether the target has been in reach
        self.ceiling = math.inf  # of the factor
        self.is_on = True  # off where the policy is not trained
        self.last_factor = 1.0  # of the last optimizer step
        self._hooked: Any = None
        self._used: list[float] = []  # factors of this rollout's steps
        self._sums: list[Tensor] = []  # of its minibatches
        self.undone: list[float] = []  # factors of the steps taken back, the next one's last; empty for a normal step
        self._was_skipped = False  # the last step, by fp16's loss scaler

    def attach(self, optimizer: Any) -> None:
        """Make an optimizer, wrapped by the accelerator or not, use the scaled learning rates in each step."""
        while hasattr(optimizer, "optimizer"):  # accelerate's wrapper, DeepSpeed's
            optimizer = optimizer.optimizer
        if optimizer is self._hooked:
            return
        self._hooked = optimizer
        rates: list[float] = []

        def before(optimizer: Any, *_: Any) -> None:
            self._was_skipped = bool(getattr(optimizer, "found_inf", False))  # set for fused optimizers, which skip it
            rates[:] = [group["lr"] for group in optimizer.param_groups]
            self.last_factor = self.factor_in_use
            for group in optimizer.param_groups:
                if not self.undone:
                    group["lr"] = group["lr"] * self.last_factor
                else:  # without a gradient Adam repeats the last step, each time β₁ times as large
                    group["lr"] = group["lr"] * -self.undone[-1] / group["betas"][0] ** len(self.undone)
                    for parameter in group["params"]:
                        if parameter.grad is not None:
                            parameter.grad.zero_()

        def after(optimizer: Any, *_: Any) -> None:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

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
    def schedule(self) -> float:
        """Return the present scheduled learning rate divided by the initial one; 1 without a schedule."""
        group = self._hooked.param_groups[0] if self._hooked is not None else {}
        return group["lr"] / group["initial_lr"] if group.get("initial_lr") else 1.0

    @property
    def present_target(self) -> float:
        """Return the KL at which the rollout's updates should end, in nats per choice; 0 if rates are not adapted."""
        return self._full_target * (self.schedule * self.requested_scale) ** 2

    @property
    def _full_target(self) -> float:
        """Return `present_target` as it is before a schedule or a callback lowers it."""
        return min(self.target, self.kl_limit / max(self._choices, 1e-6))

    def observe(self, sums: Tensor, taken: int, steps: int) -> float:
        """
        Update the factor by the KL of the rollout's optimizer steps so far, and return this KL, nats per choice.

        Args:
            sums: (4,), over the next minibatch on all processes, after `taken` steps: the two sums of
                [`step_kl_sums`], the sum of |advantage|, and the number of completions. If the third is 0, the KL
                says nothing about the rates, and the factor stays.
            taken: number of steps taken on the rollout so far.
            steps: number of all steps on the rollout.
        """
        del self._used[taken:], self._sums[taken:]
        if self._was_skipped and self._used:
            self._used[-1] = 0.0
        self._was_skipped = self._hooked is not None  # unless the next step is taken
        sums = sums.cpu().double()
        steps_left = [step for step, factor in enumerate(self._used) if factor]  # those that were not taken back
        if steps_left and taken < steps and self._went_too_far(sums):
            self.undone.append(self._used[steps_left[-1]])
            self._used[steps_left[-1]] = 0.0
            self.ceiling = min(self.ceiling, max(self.undone) / 2)
            self.factor = min(self.factor, self.ceiling)
            sums = self._sums[steps_left[-1]]  # the policy is about as it was then
        else:
            self.undone = []
        self._sums.append(sums)
        last = torch.stack(self._sums[-self.minibatches :])  # a single minibatch would be noisy
        # The expected KL grows as the square of the sum of the factors so far. `kl` fits it to all of `last` by least
        # squares
        moved = torch.tensor([0.0, *accumulate(self._used)][-len(last) :], dtype=torch.float64)
        shares = (moved / moved[-1]) ** 2 if moved[-1] else torch.ones(len(last))
        kl = float((last[:, 0] * shares).sum() / (last[:, 1] * shares**2).sum().clamp(min=1e-6))
        self._choices = float(last[:, 1].sum() / last[:, 3].sum().clamp(min=1e-6))
        target = self.present_target
        share = taken / steps
        if target and moved[-1] and kl > 0 and sums[2] > 0:
            factor = learning_rate_factor(self.factor, sum(self._used) / taken, kl, target, share)
            ratio = kl / (share**2 * target)
            self.was_near_target |= 2 * taken >= steps and ratio > 0.25
            _, rise, recovery = next(row for row in self.RISES if ratio > row[0])
            highest = self._used[0] * rise if self.was_near_target else self.BOUNDS[1]
            if 2 * taken >= steps and kl > self.OVERSHOOT * share**2 * self._full_target:
                self.ceiling = min(self.ceiling, max(self._used) / 2)
            highest = min(max(highest, self.factor), self.ceiling)
            self.factor = max(self.BOUNDS[0], min(factor, self.BOUNDS[1], highest))
            if taken == max(steps - 1, 1):
                self.ceiling *= recovery
        self._used.append(0.0 if self.undone else self.factor)
        return kl

    def _went_too_far(self, sums: Tensor) -> bool:
        """Return whether the last step must be undone, since the policy has dropped tokens that it was certain of."""
        name = type(self._hooked).__name__
        # Without a gradient neither NAdam, Lion nor a schedule-free optimizer repeats its last step
        repeats = "Adam" in name and "NAdam" not in name and "Free" not in name
        target = max(self.present_target, self._full_target / 10)  # where a schedule ends, rounding would count
        limit = self.OVERSHOOT * target * sums[1] + self.DROPPED
        return bool(self.target and repeats and self._hooked.param_groups[0]["betas"][0] and sums[0] > limit)

    def rescale(self, ratio: float) -> None:
        """After a change of the learning rate, multiply the factor by old ÷ new, so that steps stay as large."""
        if self.target:
            self.factor *= ratio
            self.ceiling *= ratio

    def state_dict(self) -> dict[str, Any]:
        names = "factor", "requested_scale", "was_near_target", "ceiling", "target"
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.requested_scale = state["requested_scale"]
        if self.target and state["target"]:  # a run without a target has found no factor
            for name in ("factor", "was_near_target", "ceiling"):
                setattr(self, name, state[name])


_DECAY = 0.9  # factor of the sum over earlier rollouts, at each new rollout


class BaselineGate:
    """
    Hold the critic's weight in the baseline (`baseline: gated`).

    [`critic_products`] gives two numbers for a rollout. Both are added up over the rollouts so far, where a rollout
    counts 0.9 times as much as the next one. The weight is [`critic_weight`] of the two sums.
    """

    # Both sums begin at 0, so both are too small by the same factor, which cancels in their quotient

    def __init__(self):
        self.products = torch.zeros(2, dtype=torch.float64)

    def update(self, products: Tensor) -> float:
        """
        Add `products`, the (2,) `critic_products` of a rollout of all processes; return the critic's weight w for this
        rollout.
        """
        self.products = _DECAY * self.products + products.detach().cpu().double()
        return self.weight

    @property
    def weight(self) -> float:
        return critic_weight(self.products)

    def state_dict(self) -> dict[str, Any]:
        return {"products": self.products}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.products = state["products"]


_NO_VARIANCE = 1e-8  # scores with at most this variance count as equal; `whiten` adds the same to the variance


class RewardNormalizer:
    """
    Standardise the scores of a rollout: (score − mean) / standard deviation.

    | kind | mean and standard deviation of |
    |---|---|
    | `none` | – (the scores stay as they are) |
    | `running` | all scores of the run so far, this rollout included |
    | `batch` | the scores of this rollout |
    | `group` | all scores of the row's group so far, this rollout included |
    | `reference` | the demonstrations' scores (only the mean is subtracted) |

    Every process passes the scores of all processes, so that all processes compute the same mean and deviation.
    """

    def __init__(self, kind: str):
        self.kind = kind
        self.running = empty_moments("cpu")
        self.groups: dict[str, Tensor] = {}
        self.reference_mean: float | None = None

    def __call__(self, scores: Tensor, groups: list[str] | None = None) -> tuple[Tensor, Tensor]:
        """
        Standardise the scores of a rollout.

        Args:
            scores: (N,) on the CPU, of all processes. NaN, for rows without a score, is left out and stays NaN.
            groups: the name of each row's group, needed only for the kind `group`.

        Returns:
            The (N,) standardised scores; and the (N,) factors by which they were multiplied once the mean was
            subtracted.
        """
        match self.kind:
            case "none":
                return scores, torch.ones_like(scores)
            case "reference":
                assert self.reference_mean is not None
                return scores - self.reference_mean, torch.ones_like(scores)
            case "batch":
                return _standardise(scores, moments(scores, ~scores.isnan()))
            case "running":
                self.running = _merge(self.running, scores)
                return _standardise(scores, self.running)
        assert groups is not None
        normalised = torch.full_like(scores, torch.nan)
        scales = torch.ones_like(scores)
        for group in sorted(set(groups)):
            rows = torch.tensor([name == group for name in groups])
            self.groups[group] = _merge(self.groups.get(group, empty_moments("cpu")), scores[rows])
            normalised[rows], scales[rows] = _standardise(scores[rows], self.groups[group])
        return normalised, scales

    def state_dict(self) -> dict:
        return {"running": self.running, "groups": self.groups, "reference_mean": self.reference_mean}

    def load_state_dict(self, state: dict) -> None:
        self.running = state["running"]
        self.groups = state["groups"]
        self.reference_mean = state["reference_mean"]


def _merge(seen: Tensor, scores: Tensor) -> Tensor:
    """Add the scores that are not NaN to the moments `seen`."""
    return merge_moments(torch.stack([seen, moments(scores, ~scores.isnan())]))


def _standardise(scores: Tensor, score_moments: Tensor) -> tuple[Tensor, Tensor]:
    """Whiten (N,) scores by these moments; return them with the (N,) factors that multiplied them. NaN stays NaN."""
    valid = ~scores.isnan()
    # Where all scores are equal, their deviation says nothing about the scores of single tokens
    scale = whitening_scale(score_moments) if variance(score_moments) > _NO_VARIANCE else torch.ones(())
    scale = scale.to(scores).expand_as(scores)
    return whiten(scores, valid, score_moments).masked_fill(~valid, torch.nan), scale


def mean_demonstration_score(trainer: Any) -> float:
    """
    Return the mean weighted score of the demonstrations in a [`PPOTrainer`]'s training set: of the completions in its
    column `completion`, each ended by EOS.
    """
    tokenizer = trainer._tokenizer
    rows = list(trainer.train_dataset)
    prompt_ids = trainer._tokenize_prompts([row["prompt"] for row in rows])[0]
    texts = [
        row["completion"] if isinstance(row["completion"], str) else row["completion"][-1]["content"] for row in rows
    ]
    completion_ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    is_chat = is_conversational(rows[0])
    demonstrations = [
        {
            **row,
            "completion": [{"role": "assistant", "content": text}] if is_chat else text,
            "prompt_ids": asked,
            "completion_ids": [*ids, tokenizer.eos_token_id],
            "finished": True,
        }
        for row, text, asked, ids in zip(rows, texts, prompt_ids, completion_ids, strict=True)
    ]
    weights = trainer.reward_weights
    weighted = [function for function, weight in zip(trainer.reward_funcs, weights, strict=True) if weight != 0]
    rewards, _ = score_rollouts(
        Dataset.from_list(demonstrations),
        [each.function for each in weighted],
        [each.name for each in weighted],
        trainer.args.local_rollout_forward_batch_size,
    )
    scores = sequence_scores(rewards, weights[weights != 0], torch.ones(len(rewards), dtype=torch.bool))
    return scores.nanmean().item()
