"""The PPO benchmark: its counts of operations, its forced lengths, and a short run."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.flops import Flops, forward, ppo_work, seconds_at, with_backward

SHAPE = {"hidden_size": 4, "intermediate_size": 3, "num_hidden_layers": 2, "num_attention_heads": 2}


def test_forward_by_hand():
    # 2 + 2 − 1 = 3 tokens; q, k, v, o 4·16 and gate, up, down 3·12 weights a layer; 1 + 2 + 3 pairs of tokens
    expected = Flops(
        backbone=2 * 2 * 3 * (4 * 16 + 3 * 12),
        adapters=2 * 2 * 3 * 5 * (4 * (4 + 4) + 3 * (4 + 3)),
        attention=4 * 2 * 6 * 4,
        head=2 * 4 * 7 * 2,
    )
    assert forward(SHAPE, vocabulary=7, prompt=2, lengths=[2], rank=5) == expected
    assert forward(SHAPE, 7, 2, [2, 2], rank=5) == expected * 2
    assert forward(SHAPE, 7, 2, [2], head=False) == expected._replace(adapters=0, head=0)


def test_forward_is_what_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=50, **shape, num_key_value_heads=2, attn_implementation="eager")
    model = LlamaForCausalLM(config)
    with FlopCounterMode(display=False) as counter:
        loss = model(torch.ones(1, 9, dtype=torch.long), logits_to_keep=4).logits.sum()
    once = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    counted = forward({**shape, "num_key_value_heads": 2}, 50, prompt=6, lengths=[4])
    # torch computes all 9 · 9 pairs of tokens, though 45 are needed
    counted = counted._replace(attention=counted.attention * 81 / 45)
    assert once == sum(counted)
    assert counter.get_total_flops() + once == sum(with_backward(counted, is_lora=False))


def test_backward_and_the_parts_of_ppo():
    one = forward(SHAPE, 7, 2, [2], rank=5)
    assert with_backward(one, is_lora=False) == one * 3
    assert with_backward(one, is_lora=True) == Flops(
        2 * one.backbone, 3 * one.adapters, 3 * one.attention, 2 * one.head
    )
    work = ppo_work(SHAPE, 7, 2, [2], epochs=4)
    policy = forward(SHAPE, 7, 2, [2])
    assert work["generation"] == policy
    assert work["rollout passes"] == policy + policy._replace(head=0)  # reference and critic
    assert work["update"] == (policy + policy._replace(head=0)) * 12
    alone = ppo_work(SHAPE, 7, 2, [2], epochs=4, critic=False)
    assert alone["rollout passes"] == policy and alone["update"] == policy * 12
    assert seconds_at({"a": Flops(1, 2, 3, 10), "b": Flops(0, 0, 0, 10)}, head_rate=5, backbone_rate=2) == 4 + 3


@pytest.mark.slow
def test_it_runs():
    script = Path(__file__).parents[2] / "benchmarks" / "ppo.py"
    command = [sys.executable, str(script), "--short", "--sides", "ours"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [line.split(" | ")[1] for line in done.stdout.splitlines() if line.startswith("| tiny")]
    assert rows == ["ours"]
