"""
What needs a GPU: its numbers beside a CPU's, its attention and kernels, and killed runs.

    pytest tests/gpu -m ""                                  # on a machine with a GPU, else all is skipped
    TRL_EXT_TEST_DEVICE=cpu pytest tests/gpu -m ""          # only to see that the tests run
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.gpu_row import without
from tests.agents import Counter, byte_tokenizer, call, counts
from tests.ppo.agent_worker import rows
from tests.tiny import (
    CHECKPOINTING,
    collected,
    optimizer_state,
    randomize,
    rows_of,
    scripted,
    tiny_config,
    tiny_llama,
    tiny_lora_ppo,
    tiny_ppo,
    weights,
)
from trl_ext import PPOTrainer
from trl_ext.functional import logprobs_and_entropies
from trl_ext.models.decoding import Histories, TokenSampler
from trl_ext.models.packing import _attention, starts_of
from trl_ext.runs.saving import read_marker

DEVICE = os.environ.get("TRL_EXT_TEST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="there is no GPU"),
]
BUILD = {"full": tiny_ppo, "lora": tiny_lora_ppo}
HERE = {"use_cpu": DEVICE == "cpu", "max_steps": 2, "num_ppo_epochs": 1}
# Log-probs are recorded during sampling, and also computed again
BOTH_LOGPROBS = {"old_logprobs": "recompute", "importance_sampling_mode": "token_truncate"}


@pytest.fixture(autouse=True)
def exact_products():
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    without("")


def rollout_and_steps(folder, build, **config):
    """The rows of a rollout and the weights after its two steps, moved to the CPU."""
    trainer = scripted(BUILD[build](folder, **{**HERE, "optim": "sgd", "learning_rate": 1.0, **config}))
    on = next(trainer.model.parameters()).device
    randomize(trainer.model.to("cpu"), std=0.1)
    trainer.model.to(on)
    start, taken = weights(trainer), collected(trainer)
    trainer.train()
    rows = {name: value.cpu() for name, value in rows_of(trainer).items() if torch.is_tensor(value)}
    change = {name: (after - start[name]).cpu() for name, after in weights(trainer).items()}
    return taken[0], rows, change


@pytest.mark.parametrize("build", BUILD)
def test_a_rollout_and_its_update_equal_those_of_a_cpu(build, tmp_path):
    """With SGD at a learning rate of 1 the weights change by the gradients."""
    there, rows, change = rollout_and_steps(tmp_path / "cpu", build, use_cpu=True)
    here, own_rows, own_change = rollout_and_steps(tmp_path / "here", build)
    for name in ("logprobs", "ref_logprobs", "values", "scores"):
        torch.testing.assert_close(getattr(here, name).cpu(), getattr(there, name), rtol=1e-4, atol=1e-5)
    for name in ("advantages", "returns", "loss_mask", "old_logprobs"):
        torch.testing.assert_close(own_rows[name], rows[name], rtol=1e-3, atol=1e-4)
    for name, delta in change.items():
        torch.testing.assert_close(own_change[name], delta, rtol=1e-2, atol=1e-3 * float(delta.abs().max()) + 1e-6)


@pytest.mark.parametrize("build", BUILD)
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_trains(build, checkpointing, dtype, tmp_path):
    """With adapters the base keeps its bits, for each kind of activation checkpointing."""
    model = tiny_llama().to(dtype)
    trainer = BUILD[build](tmp_path, model=model, **HERE, bf16=True, **CHECKPOINTING[checkpointing])
    start, trained = weights(trainer), {n for n, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    after = weights(trainer)
    changed = {name for name in start if not torch.equal(start[name], after[name])}
    assert changed and changed <= trained and all(value.isfinite().all() for value in after.values())
    assert build == "full" or any("base_layer" in name for name in start)
    losses = [value for log in trainer.state.log_history for name, value in log.items() if "loss" in name]
    assert len(losses) > 2 and torch.tensor(losses).isfinite().all()


def test_adapters_get_the_same_gradients_with_activation_checkpointing(tmp_path):
    found = {name: rollout_and_steps(tmp_path / name, "lora", **kwargs)[2] for name, kwargs in CHECKPOINTING.items()}
    for name, delta in found["off"].items():
        for other in ("reentrant", "non-reentrant"):
            torch.testing.assert_close(found[other][name], delta, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("build", BUILD)
def test_packed_rows_equal_padded_rows(build, tmp_path):
    packed, padded = (rollout_and_steps(tmp_path / str(free), build, padding_free=free)[0] for free in (True, False))
    for name in ("logprobs", "ref_logprobs", "values"):
        torch.testing.assert_close(getattr(packed, name), getattr(padded, name), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(DEVICE == "cpu", reason="the kernel is for a GPU")
@pytest.mark.parametrize("window", [None, 16])
def test_torchs_kernel_attends_within_packed_rows(window, monkeypatch):
    """In bfloat16 its error against float32 is no larger than SDPA's; pads get a gradient of 0."""
    without("")
    torch.manual_seed(0)
    lengths, columns = torch.tensor([70, 33, 1, 90]), 256
    starts = starts_of(lengths, columns, DEVICE)
    row = torch.arange(5).repeat_interleave(torch.cat([lengths, torch.tensor([columns - int(lengths.sum())])]))
    place = torch.arange(columns)
    mask = (row[:, None] == row) & (place[:, None] >= place) & (place[:, None] - place < (window or columns))
    draws = [torch.randn(1, heads, columns, 64, device=DEVICE) for heads in (8, 2, 2)]
    weight = torch.randn(1, columns, 8, 64, device=DEVICE) * (row < 4)[None, :, None, None].to(DEVICE)
    module = SimpleNamespace(num_key_value_groups=4, is_causal=True)

    def outputs(dtype, given, **kwargs):
        inputs = [x.detach().clone().to(dtype).requires_grad_() for x in draws]
        output = _attention(module, *inputs, given, **kwargs)[0]
        (output * weight).sum().backward()
        return [output.float() * (weight != 0), *(x.grad.float() for x in inputs)]

    truth = outputs(torch.float32, mask[None, None].to(DEVICE))
    sdpa = outputs(torch.bfloat16, mask[None, None].to(DEVICE))
    ours = outputs(torch.bfloat16, starts, sliding_window=window)
    for exact, other, found in zip(truth, sdpa, ours, strict=True):
        assert (found - exact).norm() <= 2 * (other - exact).norm() + 1e-3 * exact.norm()
    for gradient in ours[1:]:
        assert not gradient[:, :, int(lengths.sum()) :].any()


@pytest.mark.skipif(DEVICE == "cpu", reason="the kernel is for a GPU")
@pytest.mark.parametrize("build", BUILD)
def test_in_bfloat16_packed_rows_go_to_torchs_kernel(build, tmp_path):
    without("varlen")
    sdpa, _, change = rollout_and_steps(
        tmp_path / "sdpa", build, bf16=True, learning_rate=1e-2, model=tiny_llama(hidden_size=64)
    )
    without("")
    ours, _, own_change = rollout_and_steps(
        tmp_path / "ours", build, bf16=True, learning_rate=1e-2, model=tiny_llama(hidden_size=64)
    )
    for name in ("logprobs", "ref_logprobs", "values"):
        torch.testing.assert_close(getattr(ours, name), getattr(sdpa, name), rtol=0.05, atol=0.05)
    moved = torch.cat([delta.flatten() for delta in change.values()])
    assert (torch.cat([delta.flatten() for delta in own_change.values()]) - moved).norm() < 0.1 * moved.norm()


def assert_the_samplers_logprobs_are_those_of_a_pass(rollout):
    sampled = rollout.sampled_mask.bool()
    torch.testing.assert_close(rollout.sampler_logprobs[sampled], rollout.logprobs[sampled], rtol=0, atol=1e-4)
    assert rollout.logprobs[sampled].std() > 0.1


@pytest.mark.parametrize("build", BUILD)
def test_the_samplers_logprobs_are_those_of_a_pass(build, tmp_path):
    trainer = BUILD[build](tmp_path, **HERE, **BOTH_LOGPROBS)
    randomize(trainer.model.to("cpu"), std=0.3)
    trainer.model.to(trainer.accelerator.device)
    taken = collected(trainer)
    trainer.train()
    assert_the_samplers_logprobs_are_those_of_a_pass(taken[0])


def scripted_by(tokenizer, player):
    """A [`TokenSampler`] that takes the tokens of a scripted player, with the policy's log-probs."""

    def tell(sampler, input_ids, scores):
        tokens = []
        for ids in input_ids.tolist():
            history, said = tokenizer.decode(ids).rsplit("<|im_start|>assistant\n", 1)
            answer = tokenizer(player(history))["input_ids"] + [tokenizer.pad_token_id] * len(ids)  # after its end
            tokens.append(answer[len(tokenizer(said)["input_ids"])])
        tokens = torch.tensor(tokens, device=scores.device)[:, None]
        sampler._steps.append(scores.log_softmax(-1).gather(1, tokens)[:, 0])
        return scores.scatter_(1, tokens, torch.inf)

    return tell


def test_logprobs_with_a_cache_across_turns_are_those_of_a_pass(tmp_path, monkeypatch):
    """Up to three turns, where rows end at different times, against a pass over the whole history."""
    tokenizer, known, fill = byte_tokenizer(), [], Histories.fill

    def watched(histories, cache, *args):
        fill(histories, cache, *args)
        known.append(cache.get_seq_length())

    monkeypatch.setattr(Histories, "fill", watched)
    monkeypatch.setattr(TokenSampler, "__call__", scripted_by(tokenizer, counts))
    trainer = PPOTrainer(
        model=tiny_llama(len(tokenizer), max_position_embeddings=2048),
        args=tiny_config(tmp_path, **HERE, **BOTH_LOGPROBS, max_completion_length=400),
        train_dataset=rows([n % 3 for n in range(16)]),
        processing_class=tokenizer,
        environment_factory=Counter,
    )
    taken = collected(trainer)
    trainer.train()
    answers = zip(taken[0].completion_ids, taken[0].sampled_mask.bool(), strict=True)
    said = {tokenizer.decode(ids[is_drawn]) for ids, is_drawn in answers}
    assert said == {call("add", number=1) * n + "Done.<|im_end|>" for n in range(3)}
    assert known[0] == 0 and 100 < known[1] < known[2]
    assert_the_samplers_logprobs_are_those_of_a_pass(taken[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trls_kernel_equals_our_head(dtype):
    from trl.trainer.utils import selective_log_softmax_and_entropy

    torch.manual_seed(0)
    logits = torch.randn(33, 1000, device=DEVICE, dtype=dtype)
    labels = torch.randint(1000, (33,), device=DEVICE)
    found = []
    for way in (selective_log_softmax_and_entropy, logprobs_and_entropies):
        x = logits.clone().requires_grad_()
        logprobs, entropies = way(1 * x, labels)
        (logprobs.sum() + 0.1 * entropies.sum()).backward()
        found.append((logprobs.float(), entropies.float(), x.grad.float()))
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 4e-2}
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


def test_fused_adamw_is_adamw(tmp_path):
    found = {}
    for optim in ("adamw_torch", "adamw_torch_fused"):
        trainer = scripted(tiny_ppo(tmp_path / optim, **HERE, optim=optim, learning_rate=1e-3))
        trainer.train()
        found[optim] = weights(trainer)
    for name, weight in found["adamw_torch"].items():
        torch.testing.assert_close(found["adamw_torch_fused"][name], weight, rtol=1e-5, atol=2e-6)


def test_a_killed_run_ends_with_the_same_bits(tmp_path):
    """Uninterrupted; killed after step 5 and again after step 10, then to its end."""
    script = (
        "import torch, sys\n"
        "torch.use_deterministic_algorithms(True, warn_only=True)\n"
        "from tests.ppo.worker import in_processes_of_their_own as run\n"
        f"on = {{'use_cpu': {DEVICE == 'cpu'}}}\n"
        "whole = run(sys.argv[1] + '/whole', on)\n"
        "print(whole + run(sys.argv[1] + '/killed', *({**on, 'kill_after_step': step} for step in (5, 10, 0))))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        capture_output=True,
        text=True,
        timeout=60 if DEVICE == "cuda" else 240,
    )
    assert done.stdout.splitlines()[-1:] == ["[0, -9, -9, 0]"], done.stdout[-2000:] + done.stderr[-4000:]
    assert re.findall(r"Resuming from .*checkpoint-(\d+), step", done.stdout) == ["4", "8"]
    whole, killed = (torch.load(tmp_path / name / "end.pt", weights_only=False) for name in ("whole", "killed"))
    for part in ("weights", "optimizer"):
        assert all(torch.equal(value, killed[part][name]) for name, value in whole[part].items()), part


@pytest.mark.parametrize("where", ["foreground", "background"])
def test_seconds_that_training_waits_for_a_checkpoint(where, tmp_path, record_property):
    """Each checkpoint is complete and has the bits of its step, though training continued while it was written."""
    size = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8} if DEVICE == "cuda" else {}
    saving = {"save_strategy": "steps", "save_steps": 2, "save_in_background": where == "background"}
    trainer = scripted(tiny_ppo(tmp_path, tiny_llama(**size), **{**HERE, **saving, "max_steps": 4}))
    states, spent, save = {}, [], trainer._save_checkpoint

    def timed(*args):
        states[trainer.state.global_step] = {"weights": weights(trainer), "optimizer": optimizer_state(trainer)}
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        save(*args)
        spent.append(time.perf_counter() - start)

    trainer._save_checkpoint = timed
    trainer.train()
    for step, state in states.items():
        folder = tmp_path / f"checkpoint-{step}"
        assert read_marker(folder)
        saved = {
            f"{role}.{name}": weight
            for role, file in {"policy": "model.safetensors", "critic": "critic/model.safetensors"}.items()
            for name, weight in load_file(folder / file).items()
        }
        loaded = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=False)["state"]
        moments = {f"{i}.{name}": value for i, each in loaded.items() for name, value in each.items()}
        for wanted, found in ((state["weights"], saved), (state["optimizer"], moments)):
            assert wanted.keys() == found.keys()
            assert all(torch.equal(value.cpu(), found[name]) for name, value in wanted.items())
    assert [*states] == [2, 4]
    size = sum(file.stat().st_size for file in folder.rglob("*"))
    print(f"\n{where}: {spent} s for {size / 2**30:.2f} GiB")
    record_property(f"{where}, s", spent)


def test_qlora(tmp_path):
    """The adapters change, and the 4-bit base does not."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    tiny_llama(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "base")
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    base = str(tmp_path / "base")
    trainer = tiny_lora_ppo(tmp_path, model=base, quantization_config=quantization, **HERE, bf16=True)
    start = weights(trainer)
    trainer.train()
    after, quantized = weights(trainer), {n for n, p in trainer.model.named_parameters() if p.dtype == torch.uint8}
    changed = {name for name in start if not torch.equal(start[name], after[name])}
    assert any(isinstance(module, bitsandbytes.nn.Linear4bit) for module in trainer.model.modules())
    assert quantized and changed and changed <= {n for n, p in trainer.model.named_parameters() if p.requires_grad}
    assert all(after[name].isfinite().all() for name in changed)
