"""Attention over packed rows by a kernel that knows where rows begin. A CPU has no such kernel: a loop stands in."""

import pytest
import torch
from torch import nn
from torch.nn.attention import varlen
from transformers import PreTrainedModel

from tests.ppo.worker import CHECKPOINTING, draw, lora_trainer, make_trainer, rows_of, scripted, weights
from trl_ext.models.varlen import NAME, use_varlen
from trl_ext.ppo import passes


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
    """Return a list of the models that attend so, whatever their device and dtype."""
    taken = []

    def used(module, dtype):
        use_varlen(module)  # registers the names
        for each in module.modules():
            if isinstance(each, PreTrainedModel) and each.config._attn_implementation == "sdpa":
                each.set_attn_implementation(NAME)
                taken.append(each)

    monkeypatch.setattr(varlen, "varlen_attn", row_by_row)
    monkeypatch.setattr(passes, "use_varlen", used)
    return taken


@pytest.mark.parametrize("build", [make_trainer, lora_trainer])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_a_rollout_and_its_update_are_those_of_sdpa(build, checkpointing, on_cpu, tmp_path, monkeypatch):
    def trained(name):
        more = {"optim": "sgd", "learning_rate": 1.0, "num_ppo_epochs": 1, "pad_to_multiple_of": 32, "max_steps": 2}
        trainer = scripted(build(tmp_path / name, **more, **CHECKPOINTING[checkpointing]))
        draw(trainer.model)
        trainer.train()
        return rows_of(trainer), weights(trainer)

    rows, after = trained("varlen")
    assert on_cpu
    monkeypatch.setattr(passes, "use_varlen", lambda *_: None)
    sdpa_rows, sdpa_after = trained("sdpa")
    for name in ("old_logprobs", "old_values", "advantages"):
        torch.testing.assert_close(rows[name], sdpa_rows[name], rtol=1e-4, atol=1e-5)
    for name, weight in sdpa_after.items():
        torch.testing.assert_close(after[name], weight, rtol=1e-4, atol=1e-5)


def test_a_cpu_keeps_sdpa(tmp_path):
    trainer = scripted(make_trainer(tmp_path, max_steps=1))
    trainer.train()
    assert trainer.model.config._attn_implementation == "sdpa"
