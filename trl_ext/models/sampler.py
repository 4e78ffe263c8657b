"""Sample tokens from a policy, and record the log-probs of the sampled tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import GenerationConfig
from transformers.generation import LogitsProcessor, LogitsProcessorList

_BLOCK = 128  # tokens: a sum over blocks and one within a block are more exact than one over the whole vocabulary


def draw(scores: Tensor) -> tuple[Tensor, Tensor]:
    """
    Draw one token for each row, with probability P(v) = exp(s_v) / Σ_u exp(s_u).

    First a block of neighbouring token ids is drawn, then a token of this block, each by inverting a cumulative sum.

    `torch.multinomial` draws a random number for each token of the vocabulary, which on a CPU takes a third of the
    time of decoding.

    Args:
        scores: (B, V), -inf for tokens that cannot be drawn.

    Returns:
        (B,) token ids, and (B,) float32 log-probs, nats.

    Raises:
        RuntimeError: the scores of a row are NaN or +inf somewhere, or −inf everywhere.
    """
    peak = scores.amax(-1, keepdim=True)
    weights = (scores - peak).exp_()
    if missing := -weights.size(-1) % _BLOCK:
        weights = pad(weights, (0, missing))
    weights = weights.unflatten(-1, (-1, _BLOCK))
    uniform = torch.rand(2, len(scores), 1, dtype=_widest_dtype(scores), device=scores.device)
    block, total = _invert(weights.sum(-1), uniform[0])
    if not total.isfinite().all():
        raise RuntimeError(
            "The policy's logits are NaN or inf, so no token can be drawn. Either training has diverged, or the dtype "
            "is too narrow for this model. Lower the learning rate, or use bfloat16 or float32."
        )
    place, _ = _invert(weights.gather(1, block[..., None].expand(-1, -1, _BLOCK)).squeeze(1), uniform[1])
    token = block * _BLOCK + place
    logprobs = scores.gather(1, token) - peak - total.log().to(scores.dtype)
    return token.squeeze(1), logprobs.squeeze(1)


def _invert(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """
    Choose a place in each row, with a probability proportional to its weight, by inverting the cumulative sum.

    Args:
        weights: (B, N), >= 0.
        uniform: (B, 1), random numbers in [0, 1).

    Returns:
        (B, 1) places, none of weight 0, and (B, 1) sums of each row's weights.
    """
    cumulative = weights.to(uniform.dtype).cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    return torch.searchsorted(cumulative, (1 - uniform) * total), total


def _widest_dtype(scores: Tensor) -> torch.dtype:
    return torch.float32 if scores.device.type == "mps" else torch.float64


class TokenSampler(LogitsProcessor):
    """
    Draw the tokens in place of `generate`, as the last of its logits processors, and keep their log-probs.

    A token is drawn also for a row that has ended; `generate` replaces this token by a pad token.
    """

    def __init__(self) -> None:
        self._steps: list[Tensor] = []
        self._draws = False

    @contextmanager
    def attached(self, model: Any) -> Iterator[None]:
        get_processors = model._get_logits_processor  # since `generate` puts custom processors before the warpers

        def with_sampler(generation_config: GenerationConfig, *args: Any, **kwargs: Any) -> LogitsProcessorList:
            processors = get_processors(generation_config, *args, **kwargs)
            processors.append(self)
            self._draws = generation_config.do_sample
            generation_config.do_sample = False  # in `generate`'s copy, so that it takes the largest score: ours
            return processors

        model._get_logits_processor = with_sampler
        try:
            yield
        finally:
            del model._get_logits_processor

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not self._draws:
            self._steps.append(scores.amax(-1) - scores.logsumexp(-1))
            return scores
        tokens, logprobs = draw(scores)
        self._steps.append(logprobs)
        return scores.scatter_(1, tokens[:, None], torch.inf)

    def take(self, tokens: int) -> Tensor:
        """
        Return the (B, `tokens`) log-probs, nats, of the first `tokens` steps since the previous `take`.

        Log-probs of further steps are dropped, since `generate` has dropped their tokens.
        """
        steps, self._steps = self._steps, []
        return torch.stack(steps[:tokens], dim=1)


class SamplerRecorder:
    """Keep the tokens drawn in a rollout, and their log-probs when drawn, that is, after warpers such as top-k."""

    def __init__(self) -> None:
        self._drawn: list[tuple[Tensor, Tensor]] = []  # (B, T) ids and log-probs of each batch of prompts

    def add(self, ids: Tensor, logprobs: Tensor) -> None:
        self._drawn.append((ids, logprobs))

    def take(self, answers: list[list[int]]) -> list[list[float]] | None:
        """
        Return the log-prob of each token of `answers`, nats, and forget all tokens drawn so far.

        Return None if `answers` are not the tokens that were drawn, because other code has changed them.
        """
        drawn = [row for batch, _ in self._drawn for row in batch.tolist()]
        logprobs = [row for _, batch in self._drawn for row in batch.tolist()]
        self._drawn = []
        if len(drawn) != len(answers):
            return None
        if any(row[: len(answer)] != answer for row, answer in zip(drawn, answers, strict=True)):
            return None
        return [row[: len(answer)] for row, answer in zip(logprobs, answers, strict=True)]
