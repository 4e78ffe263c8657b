"""Decoding that drops ended rows gives the completions of one call of `generate`."""

import copy
import itertools
import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import log_softmax
from torch.testing import assert_close
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.tiny import tiny_gpt2
from trl_ext.models import decoding
from trl_ext.models.decoding import Histories, SamplerRecorder, decode, sample_tokens
from trl_ext.models.generation import completion_logprobs

SHAPE = {
    "vocab_size": 29,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.5,
    "pad_token_id": 0,
}
EOS = [2, 3, 11, 14, 17, 20, 25]
PAD = 0
LIMIT = 12


def seeded(cls, config):
    torch.manual_seed(0)
    return cls(config).eval()


def llama():
    return seeded(LlamaForCausalLM, LlamaConfig(**SHAPE))


def lora(**kwargs):
    return get_peft_model(llama(), LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **kwargs)).eval()


CONTINUED = {
    "gpt2": lambda: tiny_gpt2(vocab_size=29, initializer_range=0.6).eval(),
    "llama": llama,
    "llama with lora": lora,
    "qwen2": lambda: seeded(Qwen2ForCausalLM, Qwen2Config(**SHAPE)),
    "sliding window": lambda: seeded(MistralForCausalLM, MistralConfig(**SHAPE, sliding_window=4)),
}

each_model = pytest.mark.parametrize(  # Qwen2 decodes as Llama does
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "qwen2" else ()) for name in CONTINUED]
)


def batch(rows=12, repeats=1, seed=0):
    """Left-padded prompts of 1 to 6 tokens, each repeated `repeats` times."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 29, (rows // repeats, 6), generator=generator)
    mask = (torch.arange(6) >= torch.randint(6, (rows // repeats, 1), generator=generator)).long()
    return {name: t.repeat_interleave(repeats, 0) for name, t in (("input_ids", ids * mask), ("attention_mask", mask))}


def settings(**kwargs):
    return GenerationConfig(
        **{
            "do_sample": False,
            "max_new_tokens": LIMIT,
            "eos_token_id": EOS,
            "pad_token_id": PAD,
            "disable_compile": True,
        }
        | kwargs
    )


class Work:
    """Count calls of `generate`, and tokens that the backbone reads."""

    def __init__(self, model, monkeypatch):
        self.calls = self.tokens = 0
        base, generate = decoding.base_model_of(model), model.generate

        def counted(*args, **kwargs):
            self.calls += 1
            return generate(*args, **kwargs)

        def read(module, args, kwargs):
            self.tokens += (args[0] if args else kwargs["input_ids"]).numel()

        monkeypatch.setattr(model, "generate", counted)
        base.base_model.register_forward_pre_hook(read, with_kwargs=True)


def taken(recorder, answers, mask):
    """(B, T) log-probs of the sampled tokens, 0 where the mask is 0."""
    rows = recorder.take([row[real.bool()].tolist() for row, real in zip(answers, mask, strict=True)])
    return torch.stack([torch.tensor([*row, *[0.0] * (mask.size(1) - len(row))]) for row in rows])


def both(model, inputs, config, monkeypatch):
    """The ids by one call of `generate`, those by `decode` with their log-probs, and the work of each."""
    work, recorder = Work(model, monkeypatch), SamplerRecorder()
    plain = model.generate(**inputs, generation_config=config)
    before = copy.copy(work)
    decoded = decode(model, recorder, **inputs, generation_config=config)
    work.calls, work.tokens = work.calls - 1, work.tokens - before.tokens
    answers = decoded[:, inputs["input_ids"].size(1) :]
    ended = torch.isin(answers, torch.tensor(config.eos_token_id if config.eos_token_id is not None else []))
    return plain, decoded, taken(recorder, answers, (ended.cumsum(1) <= ended.int()).int()), before, work


def recomputed(model, inputs, sequences, eos=EOS):
    """(B, T) log-probs of the completions by a forward pass, 0 after their ends."""
    width = inputs["input_ids"].size(1)
    prompts = [
        ids[mask.bool()].tolist() for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    ]
    answers = [
        row[: next((i + 1 for i, token in enumerate(row) if token in eos), len(row))]
        for row in sequences[:, width:].tolist()
    ]
    return completion_logprobs(model, prompts, answers)


@pytest.mark.parametrize("repeats", [1, 4])
@each_model
def test_greedy_completions_equal_those_of_one_call(name, repeats, monkeypatch):
    model, inputs = CONTINUED[name](), batch(repeats=repeats)
    plain, decoded, logprobs, before, work = both(model, inputs, settings(), monkeypatch)
    assert_close(decoded, plain, rtol=0, atol=0)
    lengths = (~torch.isin(plain[:, 6:], torch.tensor(EOS))).cumprod(1).sum(1)
    assert len(set(lengths.tolist())) > 2 // repeats  # else no row was dropped
    assert work.calls > 1 and work.tokens < before.tokens
    expected, mask = recomputed(model, inputs, decoded)
    assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    assert (logprobs[~mask] == 0).all()


@pytest.mark.parametrize("repeats", [1, 2, 4])
def test_each_prompt_is_read_once(repeats, monkeypatch):
    """Except for its last token: each row reads it, since it samples from its logits."""
    model, inputs = llama(), batch(repeats=repeats)
    shuffled = {name: values[torch.arange(12) * 5 % 12] for name, values in inputs.items()}
    plain, decoded, _, before, work = both(model, shuffled, settings(max_new_tokens=1), monkeypatch)
    assert_close(decoded, plain, rtol=0, atol=0)
    assert (before.tokens, work.tokens) == (72, 72 if repeats == 1 else 12 // repeats * 5 + 12)


def left_padded(rows):
    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


@each_model
def test_a_next_turn_reads_only_new_tokens(name, monkeypatch):
    """Three turns in batches of different sizes; some rows end, others have more or fewer new tokens."""
    model, config, histories = CONTINUED[name](), settings(suppress_tokens=[PAD]), Histories(24)
    work, generator = Work(model, monkeypatch), torch.Generator().manual_seed(1)
    rows = [ids[mask.bool()].tolist() for ids, mask in zip(*batch(rows=24, repeats=2).values(), strict=True)]
    for turn, size in enumerate((24, 5, 24)):
        answers, saved = [], 0
        for start in range(0, len(rows), size):
            inputs = left_padded(rows[start : start + size])
            recorders, before, read = (SamplerRecorder(), SamplerRecorder()), work.tokens, []
            for recorder, kept in zip(recorders, (None, histories), strict=True):
                decoded = decode(model, recorder, histories=kept, **inputs, generation_config=config)
                read.append(work.tokens - before)
                before = work.tokens
                sampled = decoded[:, inputs["input_ids"].size(1) :]
                if kept is None:
                    expected = sampled
            assert_close(sampled, expected, rtol=0, atol=0)
            mask = torch.isin(sampled, torch.tensor(EOS)).cumsum(1).cumsum(1) <= 1
            old, new = (taken(recorder, sampled, mask) for recorder in recorders)
            assert_close(new, old, rtol=1e-4, atol=1e-5)
            answers += [row[real].tolist() for row, real in zip(sampled, mask, strict=True)]
            saved += read[0] - read[1]
        assert (saved > 0) == (turn > 0 and name != "sliding window")
        rows = [
            [*row, *answer, *torch.randint(4, 10, (1 + number // 2 % 3,), generator=generator).tolist()]
            for number, (row, answer) in enumerate(zip(rows, answers, strict=True))
            if answer[-1] in EOS and number // 2 % 5
        ]


@pytest.mark.parametrize(
    "changed",
    [
        {"min_new_tokens": 5, "min_length": 9},
        {"repetition_penalty": 1.7},
        {"bad_words_ids": [[7], [9, 10]]},
        {"sequence_bias": {(7,): 5.0, (9, 10): -5.0}},
        {"suppress_tokens": [7, 8]},
    ],
    ids=str,
)
def test_settings_hold_over_all_calls(changed, monkeypatch):
    plain, decoded, _, _, work = both(llama(), batch(), settings(**changed), monkeypatch)
    assert_close(decoded, plain, rtol=0, atol=0)
    assert work.calls > 1


@pytest.mark.parametrize("sharded", ["zero3", "fsdp"])
def test_processes_that_share_weights_make_equally_many_passes(sharded, monkeypatch):
    """Each forward pass gathers weights: processes would wait for one that is missing."""
    model = llama()
    if sharded == "zero3":
        monkeypatch.setattr(decoding, "is_deepspeed_zero3_enabled", lambda: True)
    else:
        monkeypatch.setattr(decoding, "FSDPModule", type(model.model.layers[0]))
    plain, decoded, _, before, work = both(model, batch(repeats=2), settings(), monkeypatch)
    assert_close(decoded, plain, rtol=0, atol=0)
    assert (work.calls, work.tokens) == (1, before.tokens)


# ---- Logits ----


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="with another BLAS nothing is changed")
@pytest.mark.parametrize("bias", [False, True])
def test_a_transposed_head_gives_the_same_logits(bias, monkeypatch):
    """It is used for up to 8 rows, and only in place of a plain layer."""
    model = llama()
    model.lm_head = torch.nn.Linear(16, 29, bias=bias)
    linear, calls = torch.nn.functional.linear, []
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *args: calls.append(args) or linear(*args))
    for shape in ((8, 1, 16), (4, 2, 16), (1, 1, 16), (9, 1, 16), (5, 2, 16)):
        x = torch.randn(*shape)
        expected = model.lm_head(x)
        calls.clear()
        with decoding._transposed_head(model):
            assert_close(model.lm_head(x), expected, rtol=1e-5, atol=1e-6)
        assert len(calls) == (shape[0] * shape[1] > 8)
    assert "forward" not in vars(model.lm_head)
    vars(model.lm_head)["forward"] = hook = lambda x: x
    with decoding._transposed_head(model):
        assert model.lm_head.forward is hook


# ---- Sampling ----


@pytest.mark.slow
def test_completions_have_their_probability():
    """All completions of up to three tokens, from a vocabulary of five, by χ². Most of the 20,000 rows end early."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE | {"vocab_size": 5, "initializer_range": 0.3})).eval()
    rows, temperature, prompts = 10_000, 0.8, torch.tensor([[0, 0, 3], [4, 3, 1]])
    mask = torch.tensor([[0, 0, 1], [1, 1, 1]])
    config = settings(do_sample=True, temperature=temperature, top_k=4, eos_token_id=[1, 2], max_new_tokens=3)
    recorder = SamplerRecorder()
    decoded = decode(
        model,
        recorder,
        input_ids=prompts.repeat_interleave(rows, 0),
        attention_mask=mask.repeat_interleave(rows, 0),
        generation_config=config,
    )[:, 3:]
    ended = torch.isin(decoded, torch.tensor([1, 2]))
    recorded = taken(recorder, decoded, (ended.cumsum(1) <= ended.int()).int()).sum(1)
    answers = [
        a
        for n in (1, 2, 3)
        for a in itertools.product(range(5), repeat=n)
        if ends(a) and not any(ends(a[:i]) for i in range(1, n))
    ]
    answers += itertools.product((0, 3, 4), repeat=3)
    for p in range(2):
        sampled = decoded[p * rows : (p + 1) * rows].tolist()
        χ2, used = 0.0, 0
        for answer in answers:
            ids = torch.cat([prompts[p][mask[p].bool()], torch.tensor(answer)])
            with torch.no_grad():
                logits = model(input_ids=ids[None]).logits[0, -len(answer) - 1 : -1] / temperature
            logits[logits < logits.topk(4).values[:, -1:]] = -torch.inf
            logprob = float(log_softmax(logits, -1).gather(1, ids[-len(answer) :, None]).sum())
            expected = rows * math.exp(logprob)
            is_it = [row == [*answer, *[PAD] * (3 - len(answer))] for row in sampled]
            if expected < 5:
                continue
            χ2, used = χ2 + (sum(is_it) - expected) ** 2 / expected, used + 1
            of_row = recorded[p * rows : (p + 1) * rows][torch.tensor(is_it)]
            assert_close(of_row, torch.full_like(of_row, logprob), rtol=1e-4, atol=1e-5)
        assert used > 10 and abs(χ2 - used) < 4 * math.sqrt(2 * used)


def ends(answer):
    return answer[-1] in (1, 2)


@pytest.mark.parametrize("vocabulary", [3, 128, 300])
def test_each_token_is_sampled_with_its_probability(vocabulary):
    torch.manual_seed(0)
    scores = torch.randn(vocabulary) * 2
    scores[0] = -torch.inf
    tokens, logprobs = sample_tokens(scores.expand(40_000, -1))
    assert_close(logprobs, scores.log_softmax(-1)[tokens], rtol=1e-6, atol=1e-6)
    p = scores.softmax(-1).double()
    share = torch.bincount(tokens, minlength=vocabulary) / 40_000
    assert ((share - p).abs() <= 5 * (p * (1 - p) / 40_000).sqrt()).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_scores_without_a_distribution_are_refused(value):
    scores = torch.zeros(2, 200)
    scores[1, 150] = value
    with pytest.raises(RuntimeError, match="NaN or inf"):
        sample_tokens(scores)
    with pytest.raises(RuntimeError, match="NaN or inf"):
        sample_tokens(torch.full((1, 5), -torch.inf))
