"""The dense LM head against TRL's tiled one: the same numbers, and which of the two runs."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.testing import assert_close
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from tests.tiny import tiny_gpt2, tiny_llama, tiny_tokenizer
from trl_ext.models.lm_head import GIB, add_dense_lm_head
from trl_ext.models.weights import base_model_of
from trl_ext.upstream.names import add_fused_lm_head

V = len(tiny_tokenizer())
TINY = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
TEMPERATURE, WIDTH = 0.7, 4


def gemma():
    return Gemma2ForCausalLM(Gemma2Config(**TINY, head_dim=4, final_logit_softcapping=1.5))


def mixtral():
    return MixtralForCausalLM(MixtralConfig(**TINY, num_local_experts=3, output_router_logits=True))


def biased():
    """GPT-2 with a bias on the head."""
    model = tiny_gpt2()
    model.lm_head = torch.nn.Linear(16, V)
    return model


def lora():
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    return get_peft_model(tiny_llama(), config)


BUILDERS = {
    "tied": lambda: tiny_llama(tie_word_embeddings=True),
    "soft-capped": gemma,
    "scaled": lambda: CohereForCausalLM(CohereConfig(**TINY, logit_scale=0.25)),
    "biased": biased,
    "experts": mixtral,
    "lora": lora,
}


def with_head(build, **kwargs):
    torch.manual_seed(0)
    model = build()
    base = base_model_of(model)
    add_fused_lm_head(base, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
    add_dense_lm_head(base, TEMPERATURE, **kwargs)
    return model.train()


def a_batch():
    """Rows with padding on both sides, one of them without a completion."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, V, (4, 6 + WIDTH), generator=generator)
    mask = torch.ones_like(ids)
    for row, (left, right) in enumerate([(0, 0), (3, 1), (0, WIDTH), (5, 3)]):
        mask[row, :left] = 0
        mask[row, 10 - right :] = 0
    places = mask.clone()
    places[:, :-WIDTH] = 0  # completions
    targets = places.flatten().nonzero()[:, 0]
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "predicts": targets - 1,
        "targets": ids.flatten()[targets],
        "fused_lm_head": True,
        "with_entropies": True,
    }


def which_ran(model, monkeypatch):
    """Record which function computes each head, TRL's or ours."""
    ran = []
    from trl.trainer import utils

    import trl_ext.models.lm_head as ours

    tiled, dense = utils._ChunkedLogProbFunction.apply, ours.logprobs_and_entropies
    monkeypatch.setattr(utils._ChunkedLogProbFunction, "apply", lambda *a: ran.append("tiled") or tiled(*a))
    monkeypatch.setattr(ours, "logprobs_and_entropies", lambda *a: ran.append("dense") or dense(*a))
    return ran


@pytest.mark.parametrize("name", BUILDERS)
def test_dense_equals_tiled_in_values_and_gradients(name, monkeypatch):
    found = []
    for budget in (1.0, 0.0):
        model = with_head(BUILDERS[name], budget_gb=budget)
        ran = which_ran(model, monkeypatch)
        output = model(**a_batch())
        assert ran == ["dense" if budget else "tiled"]
        monkeypatch.undo()
        logprobs, entropy = output.log_probs, output.entropy
        assert len(logprobs) == len(a_batch()["targets"]) and logprobs.all()
        weights = torch.arange(1.0, 1 + logprobs.numel()).view_as(logprobs).sin()
        loss = (weights * logprobs).sum() + 0.3 * (weights.flip(0) * entropy).sum()
        if name == "experts":
            loss = loss + output.aux_loss
        loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        assert all(g.isfinite().all() for g in gradients.values()) and len(gradients) >= 4
        found.append((logprobs.detach(), entropy.detach(), output.aux_loss, gradients))
    assert_close(*found, **CLOSE)


def test_bfloat16_autocast_and_checkpointing(subtests, monkeypatch):
    """Under autocast the logits are bfloat16, and the tiled head rounds them alike."""
    for checkpointing in (False, True):
        with subtests.test(checkpointing=checkpointing):
            found = []
            for budget in (1.0, 0.0):
                model = with_head(BUILDERS["tied"], budget_gb=budget)
                if checkpointing:
                    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
                with torch.autocast("cpu", torch.bfloat16):
                    output = model(**a_batch())
                assert output.log_probs.dtype == output.entropy.dtype == torch.float32
                output.log_probs.sum().backward()
                found.append((output.log_probs.detach(), {n: p.grad for n, p in model.named_parameters()}))
            assert_close(found[0][0], found[1][0], **CLOSE)
            for name, gradient in found[0][1].items():
                assert_close(gradient, found[1][1][name], rtol=2e-2, atol=2e-2 * gradient.abs().max().item())


@torch.no_grad()
def test_the_budget_decides_by_the_bytes_of_the_logits(subtests, monkeypatch):
    n = len(a_batch()["targets"])
    size = n * V * 4  # tokens, vocabulary, float32
    for what, kwargs, autocast, expected in [
        ("just", {"budget_gb": size / GIB}, False, "dense"),
        ("a byte less", {"budget_gb": (size - 1) / GIB}, False, "tiled"),
        ("in bfloat16", {"budget_gb": size / 2 / GIB}, True, "dense"),
        ("a byte less in bfloat16", {"budget_gb": (size / 2 - 1) / GIB}, True, "tiled"),
        ("none", {"budget_gb": 0}, False, "tiled"),
        ("by the most there may be", {"budget_gb": size / GIB, "budget_tokens": n + 1}, False, "tiled"),
        ("by the most, and it fits", {"budget_gb": 2 * size / GIB, "budget_tokens": 2 * n}, False, "dense"),
    ]:
        with subtests.test(what=what), monkeypatch.context() as context:
            budget_tokens = kwargs.pop("budget_tokens", None)
            model = with_head(BUILDERS["tied"], **kwargs)
            ran = which_ran(model, context)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                model(**a_batch(), budget_tokens=budget_tokens)
            assert ran == [expected]


@pytest.mark.parametrize("name", ["tied", "soft-capped"])
def test_the_gradients_of_a_tied_weight_are_added_in_place(name):
    logprobs = with_head(BUILDERS[name])(**a_batch()).log_probs
    with torch.profiler.profile(record_shapes=True) as profile:
        logprobs.sum().backward()
    both = [event.name for event in profile.events() if event.input_shapes[:2] == [[V, 16], [V, 16]]]
    assert both == ["aten::add_"]


@torch.no_grad()
def test_a_model_that_does_not_call_its_head_has_logprobs_too():
    class Functional(type(tiny_llama())):
        def forward(self, input_ids, attention_mask=None, use_cache=False, **kwargs):
            states = self.model(input_ids, attention_mask, use_cache=use_cache).last_hidden_state
            return CausalLMOutputWithPast(logits=states @ self.lm_head.weight.T)

    functional = with_head(lambda: Functional(tiny_llama().config))
    usual = with_head(tiny_llama)
    functional.load_state_dict(usual.state_dict())
    assert_close(functional(**a_batch()).log_probs, usual(**a_batch()).log_probs)
