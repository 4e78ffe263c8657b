"""Sample tokens with their log-probs, and generate as transformers does, but without the rows that have ended."""

import copy
import inspect
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import pad
from transformers import DynamicCache, GenerationConfig, GenerationMixin, StoppingCriteria
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import GenerationMode, LogitsProcessor, LogitsProcessorList

from ..functional import position_ids
from ..upstream.names import is_deepspeed_zero3_enabled
from .weights import base_model_of, context_of

# Settings under which several calls of `generate`, each continuing the completions, sample as a single call does.
# Other settings count tokens from the beginning of the call, or keep a state for each row
_CONTINUED = {
    "bad_words_ids",
    "bos_token_id",
    "disable_compile",
    "do_sample",
    "eos_token_id",
    "epsilon_cutoff",
    "eta_cutoff",
    "forced_eos_token_id",
    "max_new_tokens",
    "min_length",
    "min_new_tokens",
    "min_p",
    "no_repeat_ngram_size",
    "pad_token_id",
    "remove_invalid_values",
    "renormalize_logits",
    "repetition_penalty",
    "sequence_bias",
    "suppress_tokens",
    "temperature",
    "top_h",
    "top_k",
    "top_p",
    "transformers_version",
    "typical_p",
}


@dataclass(frozen=True)
class History:
    """
    Hold the tokens of a row that the model has read so far, with their keys and values.

    Args:
        ids: the row's first L tokens, without padding.
        layers: for each layer its keys and its values, (heads, L, D) each.
    """

    ids: list[int]
    layers: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, cache: DynamicCache, ids: Tensor, row: int, start: int, stop: int) -> "History":
        """Copy columns `start` to `stop` − 1 of row `row` from the (B, W) ids and from the cache."""
        layers = [
            (layer.keys[row, :, start:stop].clone(), layer.values[row, :, start:stop].clone())
            for layer in cache.layers
        ]
        return cls(ids[row, start:stop].tolist(), layers)


class Histories:
    """
    Store the [`History`] of each row between turns, so that the model need not read these tokens again.

    A turn is what the model generates for a row until tools are called. A prompt of the next turn that begins with a
    stored history gets the history's keys and values.

    Args:
        limit: largest number of histories. They take no more memory than the cache of a batch of `limit` rows.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._kept: deque[History] = deque()

    @staticmethod
    def can_keep(cache: DynamicCache) -> bool:
        """
        Return whether each layer of the cache holds the keys and values of all tokens, not only of a sliding window.
        """
        return all(type(layer) is DynamicLayer for layer in cache.layers)

    def add(self, histories: dict[int, History]) -> None:
        """Store `histories` in order of their keys, which are row numbers, until `limit` histories are stored."""
        rows = sorted(histories)[: max(0, self.limit - len(self._kept))]
        self._kept.extend(histories[row] for row in rows)

    def fill(self, cache: DynamicCache, input_ids: Tensor, attention_mask: Tensor) -> None:
        """
        Move the stored keys and values of the prompts `input_ids` into the empty `cache`.

        If nothing is stored for one of the longest prompts, `cache` stays empty. Otherwise the model then reads
        equally many tokens of each row: as many as the row with the most new tokens has. Of a row with fewer new
        tokens it reads some stored tokens again.

        Args:
            input_ids, attention_mask: (B, P), left-padded.
        """
        width = input_ids.size(1)
        lengths = attention_mask.sum(1).tolist()
        found = [self._take(row[width - length :]) for row, length in zip(input_ids.tolist(), lengths, strict=True)]
        new = max(length - (len(known.ids) if known else 0) for length, known in zip(lengths, found, strict=True))
        some = next(filter(None, found), None)
        if some is None or new >= width:
            return
        # The cache gets the columns before the last `new`, here with width 8 and new 3 (P pad, S stored, N read now):
        #   8 tokens, 5 stored:  S S S S S | N N N
        #   5 tokens, 4 stored:  P P P S S | N N N  the last two stored ones are read again
        #   2 tokens, 0 stored:  P P P P P | P N N
        for number in range(len(some.layers)):
            rows = [
                [
                    # A row without a history has at most `new` tokens, so it takes no column of `some`
                    pad(each[:, : max(length - new, 0)], (0, 0, min(width - length, width - new), 0))
                    for each in (known or some).layers[number]
                ]
                for length, known in zip(lengths, found, strict=True)
            ]
            cache.update(*(torch.stack(each) for each in zip(*rows, strict=True)), number)

    def _take(self, ids: list[int]) -> History | None:
        """Return the first stored history that `ids` begin with, or None; delete it and all stored before it."""
        for number, history in enumerate(self._kept):
            if ids[: len(history.ids)] == history.ids:
                for _ in range(number + 1):  # rows whose histories come before it have ended
                    self._kept.popleft()
                return history
        return None


_BLOCK = 128  # tokens: a sum over blocks and one within a block are more exact than one over the whole vocabulary


def sample_tokens(scores: Tensor) -> tuple[Tensor, Tensor]:
    """
    Sample one token for each row, with probability P(v) = exp(s_v) / Σ_u exp(s_u).

    First sample a block of neighbouring token ids, then a token of this block, each by inverting a cumulative sum.
    `torch.multinomial` would generate a random number for each token of the vocabulary, which takes a third of the
    time of decoding on a CPU.

    Args:
        scores: (B, V), -inf for tokens that cannot be sampled.

    Returns:
        (B,) token ids, and their (B,) log-probs, nats, in the scores' dtype.

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
            "The policy's logits are NaN or inf, so no token can be sampled. Either training has diverged, or the "
            "dtype is too narrow for this model. Lower `step_kl_target` (if it is 0, the learning rate), or use "
            "bfloat16 or float32."
        )
    within = weights.gather(1, block[..., None].expand(-1, -1, _BLOCK)).squeeze(1)
    place, _ = _invert(within, uniform[1])
    token = block * _BLOCK + place
    logprobs = scores.gather(1, token) - peak - total.log().to(scores.dtype)
    return token.squeeze(1), logprobs.squeeze(1)


def _invert(
    weights: Tensor,  # (B, N), >= 0
    uniform: Tensor,  # (B, 1), random numbers in [0, 1)
) -> tuple[Tensor, Tensor]:
    """Sample a column of each row in proportion to its weight; return the columns and the rows' sums, (B, 1) each."""
    cumulative = weights.to(uniform.dtype).cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    # 1 − u is above 0, so no column of weight 0 is the first to reach it
    return torch.searchsorted(cumulative, (1 - uniform) * total), total


def _widest_dtype(scores: Tensor) -> torch.dtype:
    return torch.float32 if scores.device.type == "mps" else torch.float64  # MPS has no float64


class TokenSampler(LogitsProcessor):
    """
    Sample tokens in place of `generate`, as the last of its logits processors, and keep the tokens' log-probs.

    A token is sampled also for a row that has ended; `generate` replaces this token by a pad token.
    """

    def __init__(self) -> None:
        self._steps: list[Tensor] = []
        self._do_sample = False

    @contextmanager
    def attached(self, model: Any) -> Iterator[None]:
        get_processors = model._get_logits_processor  # since `generate` puts custom processors before the warpers

        def with_sampler(generation_config: GenerationConfig, *args: Any, **kwargs: Any) -> LogitsProcessorList:
            processors = get_processors(generation_config, *args, **kwargs)
            processors.append(self)
            self._do_sample = generation_config.do_sample
            generation_config.do_sample = False  # in `generate`'s copy, so that it takes the largest score: ours
            return processors

        model._get_logits_processor = with_sampler
        try:
            yield
        finally:
            del model._get_logits_processor

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not self._do_sample:
            self._steps.append(scores.amax(-1) - scores.logsumexp(-1))
            return scores
        tokens, logprobs = sample_tokens(scores)
        self._steps.append(logprobs)
        return scores.scatter_(1, tokens[:, None], torch.inf)

    def take(self, tokens: int) -> Tensor:
        """
        Return the (B, `tokens`) log-probs, nats, of the first `tokens` steps since the previous `take`.

        Log-probs of further steps are dropped, since `generate` has dropped their tokens.
        """
        steps = self._steps
        self._steps = []
        return torch.stack(steps[:tokens], dim=1)


class SamplerRecorder:
    """Keep the tokens sampled in a rollout, and their log-probs after logits warpers such as top-k."""

    def __init__(self) -> None:
        self._sampled: list[tuple[Tensor, Tensor]] = []  # (B, T) ids and log-probs of each batch of prompts

    def add(self, ids: Tensor, logprobs: Tensor) -> None:
        self._sampled.append((ids, logprobs))

    def take(self, completion_ids: list[list[int]]) -> list[list[float]] | None:
        """
        Return the log-prob of each token of `completion_ids`, nats, and forget all tokens sampled so far.

        Return None if `completion_ids` are not the tokens that were sampled, because other code has changed them.
        """
        sampled = [row for batch, _ in self._sampled for row in batch.tolist()]
        logprobs = [row for _, batch in self._sampled for row in batch.tolist()]
        self._sampled = []
        if len(sampled) != len(completion_ids):
            return None
        if any(row[: len(ids)] != ids for row, ids in zip(sampled, completion_ids, strict=True)):
            return None
        return [row[: len(ids)] for row, ids in zip(logprobs, completion_ids, strict=True)]


def decode(
    policy: Any, recorder: SamplerRecorder | None, *args: Any, histories: Histories | None = None, **inputs: Any
) -> Any:
    """
    Generate faster than `policy.generate`, from the same distribution, but with other random numbers.

    This works for sampling and greedy decoding, token by token, with the inputs below. In all other cases, such as
    beam search, call `policy.generate` unchanged, and record nothing.

    Args:
        policy: a model, plain or wrapped by PEFT.
        recorder: receives the sampled tokens, with their log-probs; None records nothing.
        histories: keys and values of rows' earlier turns, to reuse. Those of rows that end in this call are added, for
            the next turn. None keeps nothing.
        inputs: `input_ids` (B, P), left-padded, their `attention_mask`, a `generation_config`, and any other inputs
            of the model.

    Returns:
        (B, P + T) ids of prompts and completions, or whatever else `policy.generate` returns for these inputs.
    """
    config = inputs.get("generation_config")
    base = base_model_of(policy)
    other_ways = {"assistant_model", "custom_generate"} & inputs.keys()
    if args or other_ways or config is None or "input_ids" not in inputs or not _decodes_token_by_token(base, config):
        return policy.generate(*args, **inputs)
    ends = [] if config.eos_token_id is None else config.eos_token_id
    eos = torch.tensor(ends, device=inputs["input_ids"].device, dtype=torch.long)
    width = inputs["input_ids"].size(1)
    sampler = TokenSampler()
    with sampler.attached(base), _transposed_head(base):
        if _can_continue(policy, inputs):
            sequences, logprobs = _decode_live_rows(policy, sampler, eos, histories, **inputs)
        else:
            sequences = policy.generate(**inputs)
            logprobs = sampler.take(sequences.size(1) - width)
    if recorder is not None:
        recorder.add(sequences[:, width:], logprobs)
    return sequences


def _decodes_token_by_token(base: Any, config: GenerationConfig) -> bool:
    """Return whether a decoder-only `base` samples or decodes greedily, without beams, and returns tokens alone."""
    return (
        not base.config.is_encoder_decoder
        and config.get_generation_mode() in (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH)
        and not config.return_dict_in_generate
    )


def _can_continue(policy: Any, inputs: dict[str, Any]) -> bool:
    """Return whether calls of `generate`, between which rows that have ended are dropped, sample as one call would."""
    if inputs.keys() != {"input_ids", "attention_mask", "generation_config"}:  # images, say
        return False
    config = inputs["generation_config"]
    base = base_model_of(policy)
    if config.max_new_tokens is None or config.pad_token_id is None or config.to_diff_dict().keys() - _CONTINUED:
        return False
    if is_deepspeed_zero3_enabled() or any(isinstance(module, FSDPModule) for module in base.modules()):
        return False  # each process must run as many forward passes as the others
    adapters = getattr(policy, "peft_config", {}).values()
    if not all(isinstance(adapter, LoraConfig) and not adapter.alora_invocation_tokens for adapter in adapters):
        return False
    # A model's own `generate`, inputs or cache may keep a state that dropped rows stay in
    return (
        type(base).generate is GenerationMixin.generate
        and type(base).prepare_inputs_for_generation is GenerationMixin.prepare_inputs_for_generation
        and base.config.get_text_config() is base.config
        and "past_key_values" in inspect.signature(base.base_model.forward).parameters
        and all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in _cache(base).layers)
    )


@contextmanager
def _transposed_head(base: Any) -> Iterator[None]:
    """Compute a float32 LM head for up to 8 rows x as (W xᵀ)ᵀ within the `with` block, on a CPU with MKL."""
    head = base.get_output_embeddings()
    is_plain = type(head) is nn.Linear and "forward" not in vars(head)  # accelerate's hooks set one
    if not is_plain or head.weight.device.type != "cpu" or not torch.backends.mkl.is_available():
        yield
        return
    linear = head.forward

    def forward(x: Tensor) -> Tensor:
        if x.numel() > 8 * x.size(-1) or x.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
            return linear(x)
        # Faster than x Wᵀ: MKL then reads W, the model's largest matrix, in its order in memory
        logits = (head.weight @ x.flatten(0, -2).T).T.unflatten(0, x.shape[:-1])
        return logits if head.bias is None else logits + head.bias

    vars(head)["forward"] = forward
    try:
        yield
    finally:
        del vars(head)["forward"]


class _HalfEnded(StoppingCriteria):
    """Stop a call of `generate` when half of its rows have ended, so that the next call runs without these rows."""

    def __init__(self, rows: int, eos: Tensor):
        self.eos = eos
        self.ended = torch.zeros(rows, dtype=torch.bool, device=eos.device)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.ended |= torch.isin(input_ids[:, -1], self.eos)
        return (2 * self.ended.sum() >= len(self.ended)).expand(len(self.ended))


def _decode_live_rows(
    policy: Any,
    sampler: TokenSampler,
    eos: Tensor,  # ids of the tokens that end a completion
    histories: Histories | None,
    input_ids: Tensor,  # (B, P), padded on the left
    attention_mask: Tensor,  # (B, P)
    generation_config: GenerationConfig,
) -> tuple[Tensor, Tensor]:  # (B, P + T) ids, completions padded on the right; (B, T) log-probs of completions, nats
    """Generate by several calls of `generate`, each for the rows that have not ended yet."""
    base = base_model_of(policy)
    limit = generation_config.max_new_tokens
    rows, width = input_ids.shape
    sequences = input_ids.new_full((rows, width + limit), generation_config.pad_token_id)
    sequences[:, :width] = input_ids
    logprobs = torch.zeros(rows, limit, device=input_ids.device)
    cache = _cache(base)
    if histories is not None and not Histories.can_keep(cache):
        histories = None
    if histories is not None:
        histories.fill(cache, input_ids, attention_mask)
    if not cache.get_seq_length():
        cache = _prefilled(base, input_ids, attention_mask)
    starts = (width - attention_mask.sum(1)).tolist()
    kept: dict[int, History] = {}
    context = context_of(base)
    live = torch.arange(rows, device=input_ids.device)
    ids = input_ids
    mask = attention_mask
    while True:
        begin = ids.size(1)
        config = copy.deepcopy(generation_config)
        room = context - int(mask.sum(1).max())  # of the longest row
        # `generate` counts both from the beginning of this call
        config.max_new_tokens = max(1, min(limit - (begin - width), room))
        config.min_new_tokens = max(0, (config.min_new_tokens or 0) - (begin - width)) or None
        ids = policy.generate(
            input_ids=ids,
            attention_mask=mask,
            past_key_values=cache,
            generation_config=config,
            stopping_criteria=[_HalfEnded(len(ids), eos)],
        )
        end = ids.size(1)
        sequences[live, begin:end] = ids[:, begin:]
        logprobs[live, begin - width : end - width] = sampler.take(end - begin)
        ends = torch.isin(ids[:, begin:], eos)
        mask = torch.cat([mask, mask.new_ones(len(mask), end - begin)], dim=1)
        for row in ends.any(1).nonzero().flatten().tolist() if histories is not None else []:
            number, stop = int(live[row]), begin + int(ends[row].int().argmax())  # EOS itself has not been read
            kept[number] = History.of(cache, ids, row, starts[number], stop)
        going = (~ends.any(1) & (mask.sum(1) < context)).nonzero().squeeze(1)
        if len(going) == 0 or end == width + limit:
            if histories is not None:
                histories.add(kept)
            return sequences[:, :end], logprobs[:, : end - width]
        mask = mask[going]
        live = live[going]
        ids = ids[going]
        cache.batch_select_indices(going)


@torch.no_grad()
def _prefilled(base: Any, input_ids: Tensor, attention_mask: Tensor) -> DynamicCache:
    """Run `base` on the left-padded (B, P) prompts without their last token, each prompt once; return the cache."""
    cache = _cache(base)
    prompts, row = torch.stack([input_ids, attention_mask]).unique(dim=1, return_inverse=True)
    if len(row) == prompts.size(1) or input_ids.size(1) == 1:
        return cache  # empty: there is nothing to share, and `generate` will read the prompts
    ids, mask = prompts[..., :-1]  # `generate` needs a token to read
    takes_positions = "position_ids" in inspect.signature(base.base_model.forward).parameters
    positions = {"position_ids": position_ids(mask)} if takes_positions else {}
    base.base_model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **positions)
    cache.batch_select_indices(row)
    return cache


def _cache(base: Any) -> DynamicCache:
    return DynamicCache(config=base.config)
