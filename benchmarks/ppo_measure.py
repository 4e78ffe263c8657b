"""
One measurement of ppo.py, in a process of its own: `python ppo_measure.py SETTINGS` with the settings as JSON.

Prints JSON on its last line. It runs in the environment of TRL 1.12, too.
"""

import json
import math
import os
import sys
import tempfile
import time
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

from memory import peak, reset_peak, resident
from ppo_work import SHAPES, TRAINERS, build, force, forced_lengths, ours, prompts


def now(settings):
    """CPU seconds of this process, or those of the clock; a GPU has then done what it was given."""
    import torch

    if settings.device == "cuda":
        torch.cuda.synchronize()
    return time.process_time() if settings.cpu_time else time.time()


class Phases:
    """Seconds spent in TRL 1.12's functions, which has no timers."""

    def __init__(self, settings):
        import torch
        import trl.experimental.ppo.ppo_trainer as module

        self.seconds = dict.fromkeys(("generate", "logprobs"), 0.0)

        def timed(function, phase):
            def call(*args, **kwargs):
                if torch.is_grad_enabled():
                    return function(*args, **kwargs)  # of the update
                start = now(settings)
                try:
                    return function(*args, **kwargs)
                finally:
                    self.seconds[phase] += now(settings) - start

            return call

        module.batch_generation = timed(module.batch_generation, "generate")
        module.forward = timed(module.forward, "logprobs")
        module.get_reward = timed(module.get_reward, "logprobs")


def phases_in(logs):
    names = {"generate": ["generate"], "logprobs": ["logprobs", "score"]}
    return {
        phase: sum(log.get(f"time/{part}", 0.0) for log in logs for part in parts) for phase, parts in names.items()
    }


def checksums(trainer):
    import torch

    return [p.detach().sum(dtype=torch.float64).item() for p in trainer.model.parameters() if p.requires_grad]


def clock(settings, processor, phases):
    """Seconds and lengths from the end of the first rollout's updates to the end of the last one's."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        steps = 0

        def on_step_end(self, args, state, control, **kwargs):
            self.steps += 1
            per_rollout = 1 if settings.side.startswith("trl112") else settings.mini_batches * settings.epochs
            if self.steps == per_rollout:  # the first one warms up
                self.drawn, self.phases = processor.drawn.clone(), dict(phases.seconds) if phases else None
                self.start = now(settings)
            if self.steps == per_rollout * settings.rollouts:
                self.seconds = now(settings) - self.start
                self.drawn = (processor.drawn - self.drawn).tolist()
                if phases:
                    self.phases = {name: phases.seconds[name] - spent for name, spent in self.phases.items()}

    return Clock()


@contextmanager
def profiled():
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        yield
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25), file=sys.stderr)


def run_trainer(settings, folder):
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    steps = []
    register_optimizer_step_post_hook(lambda *_: steps.append(1))
    time.perf_counter = lambda: now(settings)  # which our timers read
    import peft  # noqa: F401
    import trl

    if settings.side.startswith("trl112"):  # the imports are no part of the memory
        import trl.experimental.ppo  # noqa: F401
    elif settings.side == "ours":
        from trl_ext import PPOTrainer  # noqa: F401
    else:
        from trl import GRPOTrainer, RLOOTrainer  # noqa: F401
    after_imports = 0.0 if settings.device == "cuda" else resident("VmRSS")
    reset_peak(settings.device)
    policy = build(settings, SHAPES[settings.size])
    processor = forced_lengths(settings, settings.device)
    sampling = force(policy, processor)
    trainer = TRAINERS[settings.side](settings, folder, policy)
    callback = clock(settings, processor, Phases(settings) if settings.side.startswith("trl112") else None)
    trainer.add_callback(callback)
    before = checksums(trainer)
    with profiled() if settings.profile else nullcontext():
        trainer.train()
    memory = peak(settings.device) - after_imports
    return {
        "seconds": callback.seconds,
        "peak": memory,
        "episodes": sum(callback.drawn),
        "phases": callback.phases or phases_in(trainer.state.log_history[1:]),
        "settings": effective(settings, trainer, before, sampling, callback.drawn, len(steps)),
        "versions": {"TRL": trl.__version__, "torch": torch.__version__},
    }


def effective(settings, trainer, before, sampling, drawn, steps):
    """What was really run; raises if it is not what was asked for."""
    parameters = [p for p in trainer.model.parameters() if p.requires_grad]
    models = [trainer.model, getattr(trainer, "ref_model", None), getattr(trainer, "reward_model", None)]
    models = [model for model in models if model is not None]
    logs = trainer.state.log_history
    losses = [value for log in logs for name, value in log.items() if "loss" in name]
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    moved = [a != b for a, b in zip(before, checksums(trainer), strict=True)]
    checks = {
        "optimizer steps": steps == settings.rollouts * settings.mini_batches * settings.epochs,
        "losses are finite": losses and all(map(math.isfinite, losses)),
        "most weights moved": 2 * sum(moved) > len(moved),
        "no checkpointing": not any(
            getattr(module, "gradient_checkpointing", False) for model in models for module in model.modules()
        ),
        "episodes": sum(drawn) * settings.processes == (settings.rollouts - 1) * settings.batch,
        "TRL 1.12 alone": settings.side == "ours" or "trl_ext" not in sys.modules,
    }
    if not all(checks.values()):
        raise RuntimeError(f"{settings.side} did not do the work: {checks}, {steps} steps, losses {losses}")
    return {
        "trained parameters": sum(p.numel() for p in parameters),
        "dtypes": sorted({str(p.dtype) for model in models for p in model.parameters()}),
        "attention": trainer.model.config._attn_implementation,
        "autocast": trainer.accelerator.mixed_precision,
        "lengths": drawn,
        "optimizer": [type(optimizer).__name__, bool(optimizer.defaults.get("fused"))],
        "optimizer steps": steps,
        "rates": sorted({group["lr"] for group in optimizer.param_groups}),
        "sampling": sampling,
    }


def gemm(settings):
    """FLOP/s of float32 products on one thread (bfloat16 on a GPU): as the head's, and as those of the layers."""
    import torch

    d, f = (SHAPES[settings.size][name] for name in ("hidden_size", "intermediate_size"))
    dtype, rates = getattr(torch, settings.dtype), {}
    for name, width in (("head", settings.vocabulary), ("backbone", f)):
        a = torch.randn(settings.gemm_rows, d, dtype=dtype, device=settings.device)
        b = torch.randn(width, d, dtype=dtype, device=settings.device).t()
        flops, best = 2 * a.size(0) * d * width, math.inf
        for _ in range(10):
            repeats, start = max(1, int(2e10 / flops)), now(settings)
            for _ in range(repeats):
                a @ b
            best = min(best, (now(settings) - start) / repeats)
        rates[name] = flops / best
    return rates


def run_exported(settings, folder):
    """Seconds of `generate` by the SFT model and by what a trainer of ours exports, in turn."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    policy = build(settings, SHAPES[settings.size])
    policy.save_pretrained(f"{folder}/sft")
    force(policy, forced_lengths(settings, settings.device))
    trainer = ours(settings, folder, policy)
    trainer.train()
    trainer.save_model(f"{folder}/exported")
    load = AutoModelForCausalLM.from_pretrained
    models = {"sft": load(f"{folder}/sft")}
    if settings.lora:
        models["exported"] = PeftModel.from_pretrained(load(f"{folder}/sft"), f"{folder}/exported").merge_and_unload()
    else:
        models["exported"] = load(f"{folder}/exported")
    names = [[(n, p.shape, p.dtype) for n, p in model.named_parameters()] for model in models.values()]
    if names[0] != names[1]:
        raise RuntimeError(
            f"The exported policy has other weights than the SFT model: {set(names[0]) ^ set(names[1])}"
        )
    ids = torch.tensor(prompts(settings, as_text=False)["input_ids"])[: settings.batch].to(settings.device)
    seconds = {name: [] for name in models}
    for turn in range(2 * settings.turns + 2):
        for name in list(models)[:: 1 if turn % 2 else -1]:  # neither is always the first
            start = now(settings)
            models[name].to(settings.device).generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=settings.response,
                min_new_tokens=settings.response,
            )
            if turn > 1:
                seconds[name].append(now(settings) - start)
    return seconds


def main():
    settings = SimpleNamespace(**json.loads(sys.argv[1]))
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        match settings.side:
            case "gemm":
                result = gemm(settings)
            case "exported":
                result = run_exported(settings, folder)
            case _:
                result = run_trainer(settings, folder)
    if int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
