"""
What only a GPU can show: its numbers beside a CPU's, its attention and kernels, and runs that are killed there.

    pytest tests/gpu -m ""                                  # on a machine with a GPU, else all is skipped
    TRL_EXT_TEST_DEVICE=cpu pytest tests/gpu -m ""          # see that it runs
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu_row import without
from tests.agents import Counter, byte_tokenizer, counts, played_by
from tests.ppo import worker
from tests.ppo.agent_worker import rows
from tests.ppo.worker import collected, draw, lora_trainer, make_trainer, rows_of, scripted, weights
from tests.tiny import tiny_config, tiny_llama
from trl_ext import PPOTrainer
from trl_ext.functional import logprobs_and_entropies
from trl_ext.models.varlen import _attention, starts_of

DEVICE = os.environ.get("TRL_EXT_TEST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="there is no GPU"),
]
BUILD = {"full": make_trainer, "lora": lora_trainer}
HERE = {"use_cpu": DEVICE == "cpu", "max_steps": 2, "num_ppo_epochs": 1}


@pytest.fixture(autouse=True)
def exact_products():
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    without("")


def rollout_and_steps(folder, build, **config):
    """The rows of a rollout, and the weights after its two steps, all on the CPU."""
    trainer = scripted(BUILD[build](folder, **{**HERE, "optim": "sgd", "learning_rate": 1.0, **config}))
    on = next(trainer.model.parameters()).device
    draw(trainer.model.to("cpu"), std=0.1)
    trainer.model.to(on)
    start, taken = weights(trainer), collected(trainer)
    trainer.train()
    rows = {name: value.cpu() for name, value in rows_of(trainer).items() if torch.is_tensor(value)}
    change = {name: (after - start[name]).cpu() for name, after in weights(trainer).items()}
    return taken[0], rows, change


@pytest.mark.parametrize("build", BUILD)
def test_a_rollout_and_its_update_are_those_of_a_cpu(build, tmp_path):
    """With SGD at a rate of 1 the weights change by the gradients."""
    there, rows, change = rollout_and_steps(tmp_path / "cpu", build, use_cpu=True)
    here, own_rows, own_change = rollout_and_steps(tmp_path / "here", build)
    for name in ("logprobs", "ref_logprobs", "values", "scores"):
        torch.testing.assert_close(getattr(here, name).cpu(), getattr(there, name), rtol=1e-4, atol=1e-5)
    for name in ("advantages", "returns", "loss_mask", "old_logprobs"):
        torch.testing.assert_close(own_rows[name], rows[name], rtol=1e-3, atol=1e-4)
    for name, delta in change.items():
        torch.testing.assert_close(own_change[name], delta, rtol=1e-2, atol=1e-3 * float(delta.abs().max()) + 1e-6)


@pytest.mark.parametrize("build", BUILD)
@pytest.mark.parametrize("checkpointing", worker.CHECKPOINTING)
def test_bfloat16_trains(build, checkpointing, tmp_path):
    """With adapters the base stays as it is, bit for bit, whatever recomputes the activations."""
    trainer = BUILD[build](tmp_path, **HERE, bf16=True, **worker.CHECKPOINTING[checkpointing])
    start, trained = weights(trainer), {n for n, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    after = weights(trainer)
    changed = {name for name in start if not torch.equal(start[name], after[name])}
    assert changed and changed <= trained and all(value.isfinite().all() for value in after.values())
    assert build == "full" or any("base_layer" in name for name in start)


def test_adapters_get_the_same_gradients_with_activation_checkpointing(tmp_path):
    found = {
        name: rollout_and_steps(tmp_path / name, "lora", **kwargs)[2] for name, kwargs in worker.CHECKPOINTING.items()
    }
    for name, delta in found["off"].items():
        for other in ("reentrant", "non-reentrant"):
            torch.testing.assert_close(found[other][name], delta, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("build", BUILD)
def test_packed_rows_are_padded_rows(build, tmp_path):
    packed, padded = (rollout_and_steps(tmp_path / str(free), build, padding_free=free)[0] for free in (True, False))
    for name in ("logprobs", "ref_logprobs", "values"):
        torch.testing.assert_close(getattr(packed, name), getattr(padded, name), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(DEVICE == "cpu", reason="the kernel is for a GPU")
@pytest.mark.parametrize("window", [None, 16])
def test_torchs_kernel_attends_within_packed_rows(window, monkeypatch):
    """In bfloat16 it errs no more than SDPA does, float32 being the truth; pads get a gradient of 0."""
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


@pytest.mark.parametrize("build", BUILD)
def test_the_samplers_logprobs_are_those_of_a_pass(build, tmp_path):
    trainer = BUILD[build](tmp_path, **HERE, old_logprobs="recompute", log_completions=False)
    draw(trainer.model.to("cpu"), std=0.1)
    trainer.model.to(trainer.accelerator.device)
    taken = collected(trainer)
    trainer.train()
    rollout = taken[0]
    if rollout.sampler_logprobs is not None:
        difference = (rollout.logprobs - rollout.sampler_logprobs) * rollout.drawn
        assert difference.abs().max() < 1e-4


def test_agents_with_a_cache_across_turns(tmp_path):
    """The cache of earlier turns gives the log-probs that a pass over the whole history gives."""
    tokenizer = byte_tokenizer()
    trainer = PPOTrainer(
        model=tiny_llama(len(tokenizer), max_position_embeddings=2048),
        args=tiny_config(tmp_path, **HERE, max_completion_length=400),
        train_dataset=rows([n % 3 for n in range(16)]),
        processing_class=tokenizer,
        environment_factory=Counter,
    )
    played_by(trainer, counts).train()
    log = trainer.state.log_history[0]
    assert log["tools/call_frequency"] > 0
    assert all(p.isfinite().all() for p in trainer.model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trls_kernel_computes_what_our_head_computes(dtype):
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
        trainer = scripted(make_trainer(tmp_path / optim, **HERE, optim=optim, learning_rate=1e-3))
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
        timeout=240,
    )
    assert done.stdout.splitlines()[-1:] == ["[0, -9, -9, 0]"], done.stdout[-2000:] + done.stderr[-4000:]
    whole, killed = (torch.load(tmp_path / name / "end.pt", weights_only=False) for name in ("whole", "killed"))
    for part in ("weights", "optimizer"):
        assert all(torch.equal(value, killed[part][name]) for name, value in whole[part].items()), part


def test_seconds_that_training_waits_for_a_checkpoint(tmp_path, record_property):
    model = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8} if DEVICE == "cuda" else {}
    for background in (False, True):
        trainer = scripted(
            make_trainer(
                tmp_path / str(background),
                model=tiny_llama(**model),
                **{
                    **HERE,
                    "max_steps": 4,
                    "save_strategy": "steps",
                    "save_steps": 2,
                    "save_in_background": background,
                },
            )
        )
        spent, save = [], trainer._save_checkpoint

        def timed(*args, save=save, spent=spent, **kwargs):
            start = time.perf_counter()
            save(*args, **kwargs)
            spent.append(time.perf_counter() - start)

        trainer._save_checkpoint = timed
        trainer.train()
        size = sum(file.stat().st_size for file in Path(tmp_path, str(background), "checkpoint-4").rglob("*"))
        name = "background" if background else "foreground"
        print(f"\n{name}: {min(spent):.3f} s for {size / 2**30:.2f} GiB")
        record_property(name, min(spent))
    files = [
        {path.relative_to(tmp_path / name) for path in (tmp_path / name / "checkpoint-4").rglob("*.safetensors")}
        for name in ("False", "True")
    ]
    assert files[0] == files[1] and files[0]


@pytest.mark.skipif(DEVICE == "cpu", reason="bitsandbytes' kernels are for a GPU")
def test_qlora(tmp_path):
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    tiny_llama(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "base")
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    trainer = lora_trainer(
        tmp_path, model=str(tmp_path / "base"), trainer_kwargs={"quantization_config": quantization}, **HERE, bf16=True
    )
    trainer.train()
    assert all(value.isfinite().all() for value in weights(trainer).values() if value.is_floating_point())
