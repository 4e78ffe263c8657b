"""Packed rows: the layout, the models that can read it, and that training does not change."""

import pytest
import torch
from torch import nn
from torch.nn.attention import varlen
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, Gemma2Config, Lfm2Config, MambaConfig, PreTrainedModel

from tests.tiny import (
    CHECKPOINTING,
    randomize,
    rows_of,
    scripted,
    tiny_gpt2,
    tiny_llama,
    tiny_lora_ppo,
    tiny_ppo,
    tiny_reward_model,
    weights,
)
from trl_ext.models.packing import VARLEN, keeps_rows_apart, pack, use_varlen
from trl_ext.ppo import passes

SHAPE = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "head_dim": 8}
SHAPE |= {"num_key_value_heads": 1, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def tiny_gemma2():
    """Windows of 4 tokens in every second layer, and a softcap."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(Gemma2Config(**SHAPE, sliding_window=4, initializer_range=0.2))


def tiny_lfm2():
    """A convolution, which reads across rows, and an attention layer."""
    torch.manual_seed(0)
    config = Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"], initializer_range=0.2)
    return AutoModelForCausalLM.from_config(config)


def tiny_mamba():
    return AutoModelForCausalLM.from_config(MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1))


def said_of(model):
    def forward(packed):
        logits = model(**packed.inputs).logits.flatten(0, 1)[packed.predicts]
        return (logits.log_softmax(-1).gather(1, packed.targets[:, None]).squeeze(1),)

    return forward


def padded_rows(lengths, prompt_width=9, width=7):
    """(B, P + T) ids with garbage where the padding is."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(6, 26, (len(lengths), prompt_width + width), generator=generator), width


LENGTHS = [(3, 5), (9, 7), (1, 1), (4, 0), (8, 2), (2, 7)]


@pytest.mark.parametrize(
    "how", [{}, {"hidden_size": 16, "one_sequence": True}, {"hidden_size": 10**9}, {"hidden_size": 16, "multiple": 8}]
)
@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2, tiny_gemma2])
def test_a_packed_row_equals_the_row_alone(build, how):
    """Log-probs and the gradient of their sum; garbage in the padding has no effect."""
    model, (ids, width) = build().double().eval(), padded_rows(LENGTHS)
    packed = pack(ids, LENGTHS, width, **how)
    together = packed.unpack(*said_of(model)(packed))
    together.sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    alone = torch.zeros_like(together)
    for i, (p, r) in enumerate(LENGTHS):
        row = ids[i : i + 1, ids.size(1) - width - p : ids.size(1) - width + r]
        logprobs = model(input_ids=row).logits[0, :-1].log_softmax(-1).gather(1, row[0, 1:, None])
        alone[i, :r] = logprobs[p - 1 :, 0]
    assert_close(together, alone, rtol=1e-6, atol=1e-6)
    alone.sum().backward()
    assert_close({n: p.grad for n, p in model.named_parameters()}, gradients, rtol=1e-5, atol=1e-6)


def test_the_layout():
    """Two rows in one sequence of 8, each from position 0; then each in its own."""
    ids = torch.tensor([[0, 11, 21, 22], [13, 14, 23, 0]])
    packed = pack(ids, [(1, 2), (2, 1)], 2, hidden_size=16, multiple=4, one_sequence=True)
    assert packed.input_ids[0, :6].tolist() == [11, 21, 22, 13, 14, 23]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 0, 0]]
    assert packed.mask.tolist() == [[1, 1, 1, 1, 1, 1, 0, 0]]
    assert packed.predicts.tolist() == [0, 1, 4] and packed.targets.tolist() == [21, 22, 23]
    assert packed.unpack(torch.tensor([1.0, 2.0, 3.0])).tolist() == [[1.0, 2.0], [3.0, 0.0]]
    padded = pack(ids, [(1, 2), (2, 1)], 2)
    assert padded.input_ids.tolist() == [[11, 21, 22], [13, 14, 23]] and padded.mask.all()


@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2, tiny_gemma2, tiny_lfm2])
def test_a_model_that_reads_across_rows_is_detected(build):
    assert keeps_rows_apart(said_of(build().eval()), 26, "cpu") == (build is not tiny_lfm2)


@pytest.mark.parametrize(
    "build", [tiny_llama, *(pytest.param(build, marks=pytest.mark.slow) for build in (tiny_lfm2, tiny_mamba))]
)
def test_training_is_the_same_packed_or_padded(tmp_path, build, capsys):
    """The same completions from the same weights; only rounding differs."""

    def trained(padding_free):
        torch.manual_seed(0)
        critic = None if build is tiny_llama else tiny_reward_model(tiny_llama(32, seed=5))
        given = {"padding_free": padding_free, "optim": "sgd", "max_steps": 2, "value_model": critic}
        trainer = tiny_ppo(tmp_path / str(padding_free), build(), **given)
        trainer.train()
        return {name: p.detach() for name, p in trainer.model.policy.named_parameters()}

    assert_close(trained(True), trained(False), rtol=1e-5, atol=1e-7)
    assert ("lets packed rows affect each other" in capsys.readouterr().out) == (build is not tiny_llama)


# ---- Attention by a kernel that gets the row starts; a CPU has none, so a loop stands in ----


def row_by_row(q, k, v, starts, _, longest, __, scale, window_size, enable_gqa):
    """What `varlen_attn` computes. q, k, v: (tokens, heads, size)."""
    bounds = starts.tolist()
    assert bounds[-1] == len(q) and longest == max(b - a for a, b in zip(bounds, bounds[1:], strict=False))
    assert window_size[1] == 0 and enable_gqa
    outputs = []
    for a, b in zip(bounds, bounds[1:], strict=False):
        distance = torch.arange(b - a)[:, None] - torch.arange(b - a)
        seen = (distance >= 0) & ((distance <= window_size[0]) | (window_size[0] == -1))
        row = (x[a:b].transpose(0, 1) for x in (q, k, v))
        outputs.append(nn.functional.scaled_dot_product_attention(*row, seen, scale=scale, enable_gqa=True))
    return torch.cat(outputs, dim=1).transpose(0, 1)


@pytest.fixture
def on_cpu(monkeypatch):
    """Let `varlen_attn` run on a CPU and in float32; return a list of the models that use it."""
    taken = []

    def used(module, dtype):
        use_varlen(module)  # registers the names
        for each in module.modules():
            if isinstance(each, PreTrainedModel) and each.config._attn_implementation == "sdpa":
                each.set_attn_implementation(VARLEN)
                taken.append(each)

    monkeypatch.setattr(varlen, "varlen_attn", row_by_row)
    monkeypatch.setattr(passes, "use_varlen", used)
    return taken


@pytest.mark.parametrize("build", [pytest.param(tiny_ppo, marks=pytest.mark.slow), tiny_lora_ppo])
@pytest.mark.parametrize("checkpointing", ["off", pytest.param("reentrant", marks=pytest.mark.slow), "non-reentrant"])
def test_a_rollout_and_its_update_are_those_of_sdpa(build, checkpointing, on_cpu, tmp_path, monkeypatch):
    def trained(name):
        more = {"optim": "sgd", "learning_rate": 1.0, "num_ppo_epochs": 1, "pad_to_multiple_of": 32, "max_steps": 2}
        trainer = scripted(build(tmp_path / name, **more, **CHECKPOINTING[checkpointing]))
        randomize(trainer.model)
        trainer.train()
        return rows_of(trainer), weights(trainer)

    rows, after = trained("varlen")
    assert on_cpu
    monkeypatch.setattr(passes, "use_varlen", lambda *_: None)
    sdpa_rows, sdpa_after = trained("sdpa")
    for name in ("old_logprobs", "old_values", "advantages"):
        assert_close(rows[name], sdpa_rows[name], rtol=1e-4, atol=1e-5)
    for name, weight in sdpa_after.items():
        assert_close(after[name], weight, rtol=1e-4, atol=1e-5)
