"""Standardise scores before they become rewards."""

import torch
from torch import Tensor

from ..functional import empty_moments, merge_moments, moments, variance, whiten, whitening_scale

_NO_VARIANCE = 1e-8  # scores with at most this variance count as equal; `whiten` adds the same to the variance


class RewardNormalizer:
    """
    Standardise the scores of a rollout: (score − mean) / standard deviation.

    | kind | mean and standard deviation of |
    |---|---|
    | `running` | all scores of the run so far, this rollout included |
    | `batch` | this rollout |
    | `group` | all scores of the row's group so far, this rollout included |
    | `reference` | the demonstrations, for the mean; scores are not divided |

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
            scores: (N,) on the CPU, of all processes. NaN, where no reward function gives a score, is left out.
            groups: N group names, for `group`.

        Returns:
            (N,) standardised scores; and (N,) factors that the scores were multiplied by after the mean was
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
        normalised, scales = torch.full_like(scores, torch.nan), torch.ones_like(scores)
        for group in sorted(set(groups)):
            rows = torch.tensor([name == group for name in groups])
            self.groups[group] = _merge(self.groups.get(group, empty_moments("cpu")), scores[rows])
            normalised[rows], scales[rows] = _standardise(scores[rows], self.groups[group])
        return normalised, scales

    def state_dict(self) -> dict:
        return {"running": self.running, "groups": self.groups, "reference_mean": self.reference_mean}

    def load_state_dict(self, state: dict) -> None:
        self.running, self.groups = state["running"], state["groups"]
        self.reference_mean = state["reference_mean"]


def _merge(seen: Tensor, scores: Tensor) -> Tensor:
    return merge_moments(torch.stack([seen, moments(scores, ~scores.isnan())]))


def _standardise(scores: Tensor, score_moments: Tensor) -> tuple[Tensor, Tensor]:
    valid = ~scores.isnan()
    # Where all scores are equal, their deviation says nothing about the scores of single tokens
    scale = whitening_scale(score_moments) if variance(score_moments) > _NO_VARIANCE else torch.ones(())
    scale = scale.to(scores).expand_as(scores)
    return whiten(scores, valid, score_moments).masked_fill(~valid, torch.nan), scale
