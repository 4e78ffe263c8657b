"""Closed forms against what torch, transformers and bitsandbytes really allocate."""

import pytest
import torch
from transformers import DynamicCache

from tests.tiny import tiny_llama
from trl_ext.workbench.planning import kv_cache_bytes, optimizer_bytes, quantized_bytes, share


def test_optimizer_state_is_what_torch_keeps(subtests):
    for dtype in [torch.float32, torch.bfloat16]:
        for name, cls in [
            ("adamw_torch", torch.optim.AdamW),
            ("rmsprop", torch.optim.RMSprop),
            ("sgd", torch.optim.SGD),
        ]:
            with subtests.test(name=name, dtype=dtype):
                parameters = [
                    torch.nn.Parameter(torch.randn(30, 7, dtype=dtype)),
                    torch.nn.Parameter(torch.randn(11, dtype=dtype)),
                ]
                optimizer = cls(parameters, lr=1e-3)
                for parameter in parameters:
                    parameter.grad = torch.randn_like(parameter)
                optimizer.step()
                kept = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
                assert sum(value.nbytes for value in kept) == optimizer_bytes(30 * 7 + 11, dtype.itemsize, name)


def test_eight_bit_adam_and_unknown_optimizers():
    # 1024 numbers: two moments of 1024 bytes, and a float32 for each 256
    assert optimizer_bytes(1024, 4, "adamw_bnb_8bit") == 2 * (1024 + 4 * 4)
    with pytest.raises(ValueError, match="memory that `optim: schedule` takes is not known"):
        optimizer_bytes(1, 4, "schedule")


def test_four_bits_are_what_bitsandbytes_keeps(subtests):
    for nested in [False, True]:
        with subtests.test(nested=nested):
            functional = pytest.importorskip("bitsandbytes.functional")
            packed, state = functional.quantize_4bit(
                torch.randn(64, 512), quant_type="nf4", compress_statistics=nested
            )
            kept = packed.nbytes + state.absmax.nbytes + (state.state2.absmax.nbytes if nested else 0)
            assert quantized_bytes(64 * 512, 4, nested) == kept
            assert quantized_bytes(100, 8) == 100


@torch.no_grad()
def test_kv_cache_is_what_a_model_keeps():
    model, cache = tiny_llama(num_attention_heads=4, num_key_value_heads=2), DynamicCache()
    model(input_ids=torch.ones(3, 5, dtype=torch.long), past_key_values=cache, use_cache=True)
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert kept == kv_cache_bytes(layers=2, kv_heads=2, head_dim=4, rows=3, tokens=5, number_bytes=4)


def test_shares_cover_the_whole():
    assert [share(9, n) for n in (1, 2, 4, 9)] == [9, 5, 3, 1]
