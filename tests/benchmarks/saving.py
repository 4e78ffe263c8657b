"""What a checkpoint costs: the step that makes it, and those during which it is written; and what kill −9 leaves.

    python -m tests.benchmarks.saving --output_dir outputs/saving
    python -m tests.benchmarks.saving --output_dir outputs/saving --kills 24

The first times the optimizer steps of PPO without checkpoints, with them, and with them in the background, by turns in
one process, on one prompt a step, so that a checkpoint is long against a step. The second kills a run that saves in
the background at random moments, starts it again each time until it ends, and compares that with the end of a run that
was not interrupted.
"""

import os
import random
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from tests.ppo.worker import RESUMED, end_state, make_trainer, weights
from tests.tiny import tiny_tokenizer
from trl_ext import StrictTrlParser
from trl_ext.runs.checkpoints import checkpoint_to_resume, newest_complete
from trl_ext.runs.marker import checkpoints_of


@dataclass
class BenchmarkArguments:
    """How large, and what."""

    output_dir: str = field(default="outputs/saving", metadata={"help": "Folder of runs."})
    hidden_size: int = field(default=512, metadata={"help": "Of the policy, 8 layers; the critic is as large."})
    steps: int = field(default=15, metadata={"help": "Optimizer steps of each run."})
    save_steps: int = field(default=5, metadata={"help": "Steps from one checkpoint to the next."})
    repeats: int = field(default=3, metadata={"help": "How often the ways to save take turns."})
    kills: int = field(default=0, metadata={"help": "Kill a run so many times instead."})
    seed: int = field(default=0, metadata={"help": "Of the moments at which it is killed."})


class Clock(TrainerCallback):
    """Seconds of each optimizer step without its checkpoint, and for how long each checkpoint holds training up."""

    def __init__(self, trainer):
        self.steps, self.held, self.held_cpu = [], [], []
        self.writer, self.was_busy, save = trainer._writer, [], trainer._save_checkpoint

        def timed_save(*args):
            start, cpu = time.perf_counter(), time.thread_time()
            save(*args)
            self.held.append(time.perf_counter() - start)
            self.held_cpu.append(time.thread_time() - cpu)

        trainer._save_checkpoint = timed_save

    def on_step_begin(self, args, state, control, **kwargs):
        self.start = time.perf_counter()
        self.was_busy.append(self.writer.is_busy)

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(time.perf_counter() - self.start)


def policy(args: BenchmarkArguments) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tiny_tokenizer()),
        hidden_size=args.hidden_size,
        intermediate_size=4 * args.hidden_size,
        num_hidden_layers=8,
        num_attention_heads=8,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def timed(args: BenchmarkArguments, **config) -> tuple[Clock, float, int]:
    """The clock of a run, the seconds of the whole run, and the bytes of a checkpoint."""
    folder = Path(args.output_dir, "timed")
    shutil.rmtree(folder, ignore_errors=True)
    once = {"num_ppo_epochs": 1, "num_mini_batches": 1, "per_device_train_batch_size": 1, "logging_steps": 100}
    trainer = make_trainer(folder, model=policy(args), max_steps=args.steps, save_total_limit=1, **once, **config)
    clock = Clock(trainer)
    trainer.add_callback(clock)
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    size = sum(path.stat().st_size for path in folder.glob("checkpoint-*/**/*") if path.is_file())
    shutil.rmtree(folder, ignore_errors=True)
    return clock, seconds, size


def spread(seconds: list[float]) -> str:
    return f"{median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"


def times(args: BenchmarkArguments) -> None:
    saving = {"save_strategy": "steps", "save_steps": args.save_steps}
    ways = {
        "no checkpoints": {"save_strategy": "no"},
        "training waits": saving,
        "in the background": saving | {"save_in_background": True},
    }
    runs: dict[str, list[tuple[Clock, float, int]]] = {name: [] for name in ways}
    for _ in range(args.repeats):
        for name, config in ways.items():
            runs[name].append(timed(args, **config))
    plain = [seconds for clock, *_ in runs["no checkpoints"] for seconds in clock.steps[1:]]
    print(f"a checkpoint: {max(run[2] for made in runs.values() for run in made) / 2**20:.0f} MiB")
    print(f"a step without checkpoints: {spread(plain)}")
    for name, made in runs.items():
        if name == "no checkpoints":
            continue
        clocks = [clock for clock, *_ in made]
        beside = [s for clock in clocks for s, busy in zip(clock.steps, clock.was_busy, strict=True) if busy]
        print(f"{name}: training is held up for")
        for which, held, cpu in (
            ("the first one", [c.held[0] for c in clocks], [c.held_cpu[0] for c in clocks]),
            ("later ones", [s for c in clocks for s in c.held[1:-1]], [s for c in clocks for s in c.held_cpu[1:-1]]),
        ):
            print(
                f"  {which}: {median(held):.2f} s ({min(held):.2f} to {max(held):.2f}), {median(cpu):.2f} s of a core"
            )
        if beside:
            print(
                f"  a step that begins while one is written takes {median(beside) / median(plain):.2f} times as long"
            )
    for name, made in runs.items():
        print(f"{name}: the run takes {median(run[1] for run in made):.1f} s")


def train(args: BenchmarkArguments, folder: Path, **config) -> None:
    settings = RESUMED | {"per_device_train_batch_size": 1, "max_steps": args.steps, "learning_rate": 1e-4}
    settings |= {"max_approx_kl": None, "report_to": "none"}
    trainer = make_trainer(folder, model=policy(args), **settings, **config)
    trainer.train(checkpoint_to_resume(trainer.args))
    # One that was killed after its last checkpoint is loaded, and has no optimizer
    torch.save(end_state(trainer) if trainer.optimizer else {"weights": weights(trainer)}, folder / "end.pt")


def in_a_child(folder: Path, run, kill_after: float | None = None) -> int:
    """Fork a process that runs, with what it says in `folder`.log; how it ended. The imports are shared."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        log = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        run()
        sys.stdout.flush()
        os._exit(0)
    if kill_after is not None:
        deadline = time.monotonic() + kill_after
        while time.monotonic() < deadline:
            if (ended := os.waitpid(child, os.WNOHANG))[0]:
                return os.waitstatus_to_exitcode(ended[1])
            time.sleep(0.01)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed(args: BenchmarkArguments) -> None:
    """Kill a run `args.kills` times; raise if it does not end as one that was not interrupted."""
    draw = random.Random(args.seed)
    whole, folder = Path(args.output_dir, "whole"), Path(args.output_dir, "killed")
    shutil.rmtree(whole, ignore_errors=True)
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    assert in_a_child(whole, lambda: train(args, whole, save_strategy="no")) == 0
    longest = time.monotonic() - start
    expected = torch.load(whole / "end.pt", weights_only=False)
    saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "save_in_background": True}
    kills = runs = 0
    while kills < args.kills:
        shutil.rmtree(folder, ignore_errors=True)
        runs += 1
        while True:
            moment = draw.uniform(0.2, 1.2) * longest if kills < args.kills else None
            end = in_a_child(folder, lambda: train(args, folder, **saving), moment)
            if end == 0:
                break
            assert end == -signal.SIGKILL, f"the run ended with {end}"
            kills += 1
            there = sorted(checkpoints_of(folder)) if folder.exists() else []
            newest, skipped = newest_complete(str(folder)) if there else (None, {})
            print(f"kill {kills}: checkpoints {there}, incomplete {len(skipped)}, goes on from {newest}", flush=True)
        actual = torch.load(folder / "end.pt", weights_only=False)
        of_both = {name: expected[name] for name in actual}
        torch.testing.assert_close(actual, of_both, rtol=0, atol=0, equal_nan=True)
        print(f"run {runs}: after {kills} kills in all, it ended as the uninterrupted one, bit for bit", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = StrictTrlParser(BenchmarkArguments, prog="python -m tests.benchmarks.saving", description=__doc__)
    (args,) = parser.parse_args_and_config(argv)
    if args.kills:
        killed(args)
    else:
        times(args)


if __name__ == "__main__":
    main()
