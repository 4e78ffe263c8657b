"""Formulas against what torch, transformers and bitsandbytes allocate; passes without data against real passes."""

import pytest
import torch
from torch import nn
from transformers import DynamicCache
from trl.trainer.utils import add_fused_lm_head

from tests.tiny import tiny_llama
from trl_ext.models.lm_head import add_dense_lm_head
from trl_ext.workbench.planning.memory import (
    LiveBytes,
    fake,
    kv_cache_bytes,
    optimizer_bytes,
    quantized_bytes,
    tokens,
    training_peak,
)
from trl_ext.workbench.planning.stages import scored


@pytest.mark.parametrize(
    ("name", "cls"),
    [("adamw_torch", torch.optim.AdamW), ("rmsprop", torch.optim.RMSprop), ("sgd", torch.optim.SGD)],
)
def test_optimizer_state_is_what_torch_allocates(name, cls):
    parameters = [nn.Parameter(torch.randn(shape, dtype=torch.bfloat16)) for shape in ((30, 7), (11,))]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = cls(parameters, lr=1e-3)
    optimizer.step()
    kept = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    assert sum(value.nbytes for value in kept) == optimizer_bytes(30 * 7 + 11, 2, name)


@pytest.mark.parametrize("nested", [False, True])
def test_four_bit_weights_are_what_bitsandbytes_allocates(nested):
    functional = pytest.importorskip("bitsandbytes.functional")
    packed, state = functional.quantize_4bit(torch.randn(64, 512), quant_type="nf4", compress_statistics=nested)
    kept = packed.nbytes + state.absmax.nbytes + (state.state2.absmax.nbytes if nested else 0)
    assert quantized_bytes(64 * 512, 4, nested) == kept


@torch.no_grad()
def test_the_kv_cache_is_what_a_model_allocates():
    model, cache = tiny_llama(num_attention_heads=4, num_key_value_heads=2), DynamicCache()
    model(input_ids=torch.ones(3, 5, dtype=torch.long), past_key_values=cache, use_cache=True)
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert kept == kv_cache_bytes(model.config, rows=3, tokens=5, number_bytes=4)


def test_live_bytes_of_a_chain():
    # 100 float32 numbers are 400 bytes: y = 2x stays, z = y + 1 is freed once w = z · z exists, so 3 at most
    x = torch.ones(100)
    with LiveBytes() as counted:
        y = 2 * x
        z = y + 1
        w = z * z
        del z
        assert (counted.live, counted.peak) == (800, 1200)
    assert w.sum() + y.sum() > 0


def test_a_linear_layer_keeps_its_input_and_makes_its_gradient():
    model, mode = fake(lambda: nn.Linear(8, 4, bias=False))
    fresh, kept, sharded = (
        training_peak(mode, model, lambda: model(torch.ones(16, 8)).sum(), gradients=kind)
        for kind in ("fresh", "kept", "sharded")
    )
    # At the end of the forward pass: input 16·8, output 16·4, their sum. In the backward pass the output is freed
    assert fresh == sharded == 4 * (16 * 8 + 16 * 4 + 1) and kept == fresh + 4 * 4 * 8
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_without_data_as_with_data(checkpointing, autocast):
    def build():
        model = tiny_llama(num_hidden_layers=3, vocab_size=500)
        add_fused_lm_head(model)
        add_dense_lm_head(model, budget_gb=1.0)
        if checkpointing:
            model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        return model.train()

    def loss(model):
        batch = tokens(4, 32)
        batch["attention_mask"][0, :3] = 0  # so that the real pass makes a mask, too
        return -model(**scored(batch, 24)).log_probs.mean()

    real = build()
    with LiveBytes(real) as counted:
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            value = loss(real)
        value.backward()
        del value
    model, mode = fake(build)
    assert training_peak(mode, model, lambda: loss(model), autocast) == pytest.approx(counted.peak, rel=0.02)
