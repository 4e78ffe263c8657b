"""The log-probs under which a sampler really drew its tokens."""

from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.generation import LogitsProcessor


class SamplerRecorder(LogitsProcessor):
    """Keep the log-probs under which tokens were really drawn, after every warper; reads one (B, V) tensor a step."""

    def __init__(self):
        self._logprobs: list[Tensor] = []  # one (B, T) a `generate` call
        self._steps: list[Tensor] = []
        self._pending: Tensor | None = None

    @contextmanager
    def attached(self, model: Any):
        get_processors = model._get_logits_processor  # `generate` puts custom processors before the warpers

        def with_recorder(*args, **kwargs):
            processors = get_processors(*args, **kwargs)
            processors.append(self)
            return processors

        model._get_logits_processor = with_recorder
        try:
            yield
        finally:
            del model._get_logits_processor

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._gather(input_ids)
        self._pending = scores.float().log_softmax(-1)
        return scores

    def finish(self, sequences: Tensor) -> None:
        self._gather(sequences)
        self._logprobs.append(torch.stack(self._steps, dim=1))
        self._steps = []

    def take(self, width: int) -> Tensor:
        """Return the (B, `width`) log-probs of all calls since the last `take`, 0 behind the answers; forget them."""
        drawn = [pad(chunk[:, :width], (0, max(0, width - chunk.size(1)))) for chunk in self._logprobs]
        self._logprobs = []
        return torch.cat(drawn)

    def _gather(self, input_ids: Tensor) -> None:
        if self._pending is not None:
            self._steps.append(self._pending.gather(1, input_ids[:, -1:]).squeeze(1))
        self._pending = None
