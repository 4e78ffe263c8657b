"""Times by hand: operations and bytes of a model whose weights are counted."""

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
    """2 a weight and token, without the embeddings' lookups; 2 · layers · width · length a token for attention."""
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
    assert seconds_per_example(job, result, ONE, replace(ALL, layer_ms=1000))["generate"] == pytest.approx(
        slow + 8 * 2 / rows
    )


@pytest.mark.slow
def test_each_turn_may_read_the_history_and_keeps_it(tmp_path):
    job = Job("ppo", tiny_config(tmp_path), tiny_llama().config, dtype=torch.float32, prompt_length=6)
    job.args.bf16, several = False, replace(job, turns=4)
    one, four = plan(job), plan(several)
    more = [seconds_per_example(each, plan(each), ONE, ALL)["generate"] for each in (several, job)]
    assert more[0] - more[1] == pytest.approx(16 * sum(forward(job, 6 + 8 * turn / 4) for turn in (1, 2, 3)))
    cache = [each.phases["generate"]["KV cache"] for each in (one, four)]
    assert cache[1] / cache[0] == 2  # the kept one beside the one in use
    assert one.phases["score"] == four.phases["score"] and one.phases["update"] == four.phases["update"]


def test_eight_gpus_share_the_examples(tmp_path):
    job = sft_job(tmp_path)
    eight = replace(job, layout=Layout("ddp", 8))
    one_gpu, eight_gpus = (hours(j, plan(j), ONE, ALL, 100) for j in (job, eight))
    assert eight_gpus == pytest.approx(one_gpu / 8 / ALL.scaling)


@pytest.mark.slow
def test_how_many_examples_a_run_has(tmp_path):
    for kwargs, rows, expected in [
        ({"num_train_epochs": 3}, 7, 21),
        ({"max_steps": 5, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}, None, 30),
        ({}, None, None),
    ]:
        job = sft_job(tmp_path, **kwargs)
        assert examples(job, plan(job), rows) == expected
    job = Job("ppo", tiny_config(tmp_path, max_steps=8), tiny_llama().config, prompt_length=4)
    assert examples(job, plan(job), None) == 2 * 8  # two rollouts of two epochs of two minibatches of four


def test_rollouts_ahead_hide_the_shorter_phase(tmp_path):
    job = Job("ppo", tiny_config(tmp_path), tiny_llama().config, dtype=torch.float32, prompt_length=6)
    result = plan(job)
    phases = seconds_per_example(job, result, ONE, ALL)
    job.args.rollouts_ahead = 1
    rest = phases["score"] + phases["update"]
    assert hours(job, result, ONE, ALL, 3600) == pytest.approx(max(phases["generate"], rest))


@pytest.mark.slow
def test_without_a_critic_none_is_run_or_trained(tmp_path):
    jobs = [
        Job("ppo", tiny_config(tmp_path, baseline=each), tiny_llama().config, dtype=torch.float32, prompt_length=4)
        for each in ("critic", "mean")
    ]
    (policy, critic, _), (same, idle, _) = (plan(job).roles for job in jobs)
    assert policy == same and critic.trained and (idle.trained, idle.gradients, idle.optimizer) == (0, 0, 0)
    assert idle.weights == critic.weights  # it stays in memory
    run, spared = (seconds_per_example(job, plan(job), ONE, ALL) for job in jobs)
    assert spared["generate"] == run["generate"] and spared["update"] == pytest.approx(run["update"] / 2, rel=0.1)
    assert spared["score"] == pytest.approx(run["score"] * 2 / 3, rel=0.1)  # policy, critic and reference before
