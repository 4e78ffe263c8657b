"""The counts that the benchmark's limits stand on, its forced lengths, and that it runs."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.flops import Flops, forward, ppo_work, seconds_at, with_backward

SHAPE = {"hidden_size": 4, "intermediate_size": 3, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture
def scripts(monkeypatch):
    """`ppo.py` and `ppo_work.py` as the scripts that they are: TRL 1.12's environment has no package of tests."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import ppo
    import ppo_work

    return SimpleNamespace(ppo=ppo, work=ppo_work)


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
    # One key and value head of two: k and v have half the weights
    grouped = forward({**SHAPE, "num_key_value_heads": 1}, 7, 2, [2])
    assert grouped.backbone == 2 * 2 * 3 * (2 * 16 + 2 * 8 + 3 * 12)


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
    # Torch computes all 9 · 9 pairs of tokens where 45 are needed
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


def test_lengths_depend_on_the_prompt_alone(scripts):
    settings = SimpleNamespace(rollouts=2, batch=32, prompt=16, vocabulary=30_000)
    prompts = torch.tensor(scripts.work.prompts(settings, as_text=False)["input_ids"])
    lengths = scripts.work.length_of(prompts, 48)
    kept = torch.tensor([5, 3, 17])
    assert torch.equal(scripts.work.length_of(prompts[kept], 48), lengths[kept])
    first, second = lengths.view(2, 32).sort().values
    # Of u = i / 31: the mean of u² is (2·32 − 1) / (6·31) = 0.339
    for rollout in (first, second):
        assert rollout[0] == 1 and rollout[-1] >= 47
        torch.testing.assert_close(rollout.double().mean().item() / 48, 0.339, rtol=0.02, atol=0)
    assert not torch.equal(lengths[:32], lengths[32:])  # in another order


def test_responses_end_at_their_lengths_though_rows_are_left_out(scripts):
    settings = SimpleNamespace(prompt=3, response=6, varying=True)
    ids = torch.randint(4, 90, (8, 3), generator=torch.Generator().manual_seed(0))
    lengths = scripts.work.length_of(ids, 6)
    processor, drawn = scripts.work.forced_lengths(settings, "cpu"), torch.zeros(7, dtype=torch.long)
    for position in range(1, 7):
        scores = processor(ids, torch.randn(len(ids), 90))
        ended = scores.argmax(1) == scripts.work.EOS
        assert torch.equal(ended, lengths == position)
        assert (scores[:, scripts.work.PAD] == -torch.inf).all()
        drawn[position] = ended.sum()
        ids, lengths = torch.cat([ids, scores.argmax(1, keepdim=True)], dim=1)[~ended], lengths[~ended]
        if not len(ids):
            break
    assert not len(ids) and torch.equal(processor.drawn, drawn)


def test_growth_is_a_power(scripts):
    assert scripts.ppo.exponent([1, 2, 4], [3, 12, 48]) == pytest.approx(2)


def test_sides_that_did_different_work_are_refused(scripts):
    one = {"settings": dict.fromkeys(scripts.ppo.COMPARED, 1)}
    scripts.ppo.check_equal(one, one)
    for name in scripts.ppo.COMPARED:
        with pytest.raises(RuntimeError, match=name):
            scripts.ppo.check_equal(one, {"settings": {**one["settings"], name: 2}})


@pytest.mark.slow
def test_it_runs():
    script = Path(__file__).parents[2] / "benchmarks" / "ppo.py"
    command = [sys.executable, str(script), "--short", "--sides", "ours", "rloo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [line.split(" | ")[1] for line in done.stdout.splitlines() if line.startswith("| tiny")]
    assert rows == ["ours", "TRL RLOO"]
