"""Times by hand, from the operations and bytes of a tiny model."""

from dataclasses import replace

import pytest
import torch
from trl import SFTConfig

from tests.tiny import ON_CPU, tiny_config, tiny_llama
from trl_ext.workbench.planning import GPU, Efficiency, Job, Layout, examples, hours, plan, seconds_per_example

ONE = GPU("one", 1, 1e-12, 1e-12)  # one operation and one byte a second
ALL = Efficiency(mfu=1, bandwidth=1, layer_ms=0, scaling=0.5)


def sft_job(tmp_path, **kwargs):
    args = SFTConfig(str(tmp_path), **ON_CPU | {"bf16": True}, max_length=10, gradient_checkpointing=False, **kwargs)
    return Job("sft", args, tiny_llama().config, dtype=torch.bfloat16)


def forward(job, tokens):
    """2 per weight and token, without the embeddings; 2 · layers · width · length per token for attention."""
    weights = sum(p.numel() for n, p in tiny_llama().named_parameters() if "embed_tokens" not in n)
    return tokens * (2 * weights + 2 * 2 * 16 * tokens)


def test_sft_takes_three_forward_passes_or_four_with_checkpointing(tmp_path):
    job = sft_job(tmp_path)
    result = plan(job)
    assert seconds_per_example(job, result, ONE, ALL) == {"update": 3 * forward(job, 10)}
    assert seconds_per_example(job, result, ONE, ALL, tokens=4)["update"] == 3 * forward(job, 4)
    job.args.activation_checkpointing = True
    assert seconds_per_example(job, result, ONE, ALL)["update"] == 4 * forward(job, 10)


@pytest.mark.slow
def test_generation_reads_the_weights_and_the_cache_for_each_token(tmp_path):
    job = Job("ppo", tiny_config(tmp_path), tiny_llama().config, dtype=torch.float32, prompt_length=6)
    job.args.bf16, result = False, plan(job)
    slow = seconds_per_example(job, result, ONE, ALL)["generate"]
    prefill = 16 * forward(job, 6)  # float32
    weights = 4 * sum(p.numel() for p in tiny_llama().parameters())
    rows, seen, cache = 8, 6 + 4, 2 * 2 * 2 * 4 * 4  # two of two layers, two heads of four float32
    assert slow == pytest.approx(8 * (weights + rows * seen * cache) / rows + prefill)


def test_eight_gpus_share_the_examples(tmp_path):
    job = sft_job(tmp_path)
    eight = replace(job, layout=Layout("ddp", 8))
    one_gpu, eight_gpus = (hours(j, plan(j), ONE, ALL, 100) for j in (job, eight))
    assert eight_gpus == pytest.approx(one_gpu / 8 / ALL.scaling)


@pytest.mark.slow
def test_how_many_examples_a_run_has(tmp_path):
    for kwargs, rows, expected in [({"num_train_epochs": 3}, 7, 21), ({"max_steps": 5}, None, 40), ({}, None, None)]:
        job = sft_job(tmp_path, **kwargs)
        assert examples(job, plan(job), rows) == expected
    job = Job("ppo", tiny_config(tmp_path, max_steps=8), tiny_llama().config, prompt_length=4)
    assert examples(job, plan(job), None) == 2 * 8  # two rollouts of two epochs of two minibatches of four


@pytest.mark.slow
def test_rollouts_ahead_hide_the_shorter_phase(tmp_path):
    job = Job("ppo", tiny_config(tmp_path), tiny_llama().config, dtype=torch.float32, prompt_length=6)
    result = plan(job)
    phases = seconds_per_example(job, result, ONE, ALL)
    job.args.rollouts_ahead = 1
    rest = phases["score"] + phases["update"]
    assert hours(job, result, ONE, ALL, 3600) == pytest.approx(max(phases["generate"], rest))
