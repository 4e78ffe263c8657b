"""Passes on tensors without data take as many bytes as passes on real ones."""

import pytest
import torch
from torch import nn
from trl.trainer.utils import add_fused_lm_head

from tests.tiny import tiny_llama
from trl_ext.models.lm_head import add_dense_lm_head
from trl_ext.workbench.planning import LiveBytes, fake, forward_peak, training_peak
from trl_ext.workbench.planning.phases import scored
from trl_ext.workbench.planning.simulate import tokens


def test_live_bytes_of_a_chain():
    # 100 float32 numbers are 400 bytes: y = 2x stays, z = y + 1 goes once w = z · z exists, so 3 at most
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
    peak = training_peak(mode, model, lambda: model(torch.ones(16, 8)).sum())
    # At the end of the forward pass: the input 16·8, the output 16·4, their sum. Backward: the output is gone by then
    assert peak == 4 * (16 * 8 + 16 * 4 + 1)
    kept = training_peak(mode, model, lambda: model(torch.ones(16, 8)).sum(), gradients="kept")
    sharded = training_peak(mode, model, lambda: model(torch.ones(16, 8)).sum(), gradients="sharded")
    assert kept == peak + 4 * 4 * 8 and sharded == peak
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("budget", [0.0, 1.0])
def test_without_data_as_with_data(checkpointing, autocast, budget):
    def build():
        model = tiny_llama(num_hidden_layers=3, vocab_size=500)
        add_fused_lm_head(model)
        add_dense_lm_head(model, budget_gb=budget)
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


@pytest.mark.slow
def test_checkpointing_takes_less_and_no_gradient_least():
    model, mode = fake(lambda: tiny_llama(num_hidden_layers=8).train())
    loss = lambda: model(**tokens(8, 64)).logits.mean()  # noqa: E731
    whole = training_peak(mode, model, loss)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    checkpointed = training_peak(mode, model, loss)
    assert forward_peak(mode, model, loss) < checkpointed < 0.6 * whole


def test_tied_weights_stay_tied():
    model, _ = fake(lambda: tiny_llama(tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
