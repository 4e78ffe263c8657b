"""Hold what PPO adapts from rollout to rollout: KL coefficient, critic's weight, normalised rewards."""

import math
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers.utils import logging

from ..functional import (
    adaptive_kl_coef,
    critic_weight,
    empty_moments,
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
