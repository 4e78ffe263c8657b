"""
The same PPO work through TRL 1.12.0's PPOTrainer and ours, in turn: seconds, memory, and the limit of both.

    python -m venv trl112 && grep -v ^trl= constraints.txt > trl112/constraints.txt
    trl112/bin/pip install -c trl112/constraints.txt torch transformers peft accelerate datasets trl==1.12.0
    python benchmarks/ppo.py --trl112 trl112/bin/python       # without it, its rows are left out
    python benchmarks/ppo.py --growth                         # or --processes, or --exported
    python benchmarks/ppo.py --device cuda                    # not run so far: written without a GPU at hand

Models have random weights, the same on both sides: nothing is downloaded. Each measurement is a process of its own, on
one thread, and the sides take turns. The first rollout warms up; what counts goes from the end of its last optimizer
step to the end of the last rollout's. Memory is the peak of the resident set minus what it was after the imports. Both
sides get the same prompts in the same order. With fixed lengths no EOS can be drawn; with varying ones a logits
processor makes each response as long as a hash of its prompt says (mean a third of the longest). The reward model has
one layer of width 16, so that it is PPO that is measured. What each side really did is compared, and a difference
raises.

What TRL 1.12 has no option for is done for it: its critic gets a LoRA as ours has (on a base of its own, with a value
head that is trained; the side `trl112-whole` goes without), and its prompts come in order. `bf16` does nothing in it:
its weights are bfloat16 as ours are, but its adapters, in float32 on both sides, compute in float32. Gradients are not
clipped, since it cannot. RLOO and GRPO are those of the TRL that ours stands on: two answers to half as many prompts
(so that varying lengths are others), and no critic.

The limit is the time of the matrix products that the work needs (flops.py) at the speed of a product as the
LM head's and of one as the layers', measured in the same run: real tokens only, no padding, no old log-probs. Decoding
cannot come near it: each step reads all weights for a handful of rows.
"""

import argparse
import datetime
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

from flops import ppo_work, seconds_at
from ppo_work import LORA, REWARD, SHAPES, WORK

SIDES = {
    "trl112": "TRL 1.12 PPO",
    "ours": "ours",
    "trl112-whole": "TRL 1.12 PPO, whole critic",
    "rloo": "TRL RLOO",
    "grpo": "TRL GRPO",
}
WITH_CRITIC = ("trl112", "ours", "trl112-whole")
NAMES = ("vocabulary", "prompt", "response", "batch", "mini_batches", "epochs")
COMPARED = (
    "trained parameters",
    "dtypes",
    "attention",
    "lengths",
    "optimizer",
    "optimizer steps",
    "rates",
    "sampling",
)
HEADER = (
    "| size, mode, lengths | side | episodes / s | ÷ TRL 1.12 | peak MiB | ÷ TRL 1.12 | generation · rollout passes · "
    "rest, s an episode | limit, s an episode | measured ÷ limit | update's FLOP/s ÷ the machine's |\n"
    + "|---" * 10
    + "|"
)


def settings_of(size, args, **changes):
    return {
        "size": size,
        **dict(zip(NAMES, WORK[size], strict=True)),
        **({"batch": args.batch} if args.batch else {}),
        "rollouts": args.rollouts,
        "lora": False,
        "varying": False,
        "device": args.device,
        "dtype": "float32" if args.device == "cpu" else "bfloat16",
        "processes": 1,
        "cpu_time": args.device == "cpu",
        "options": args.options,
        "profile": args.profile,
        **changes,
    }


def measure(side, settings, args):
    """Run one measurement in a process of its own; None if it ran out of a GPU's memory."""
    python = args.trl112 if side.startswith("trl112") else sys.executable
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={settings['processes']}"]
    command = [python, *(launch if settings["processes"] > 1 else [])]
    command += [str(Path(__file__).with_name("ppo_measure.py")), json.dumps({**settings, "side": side})]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if "OutOfMemoryError" in done.stderr:
        return None
    if done.returncode:
        raise RuntimeError(f"{side} with {settings} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    print(side, json.dumps(result), done.stderr if args.profile else "", file=sys.stderr, flush=True)
    return result


def check_equal(a, b):
    different = {name: (a["settings"][name], b["settings"][name]) for name in COMPARED}
    different = {name: pair for name, pair in different.items() if pair[0] != pair[1]}
    if different:
        raise RuntimeError(f"The sides did different work: {different}")


def work_of(settings, result, side):
    """FLOPs of the rollouts that were counted."""
    lengths = [length for length, count in enumerate(result["settings"]["lengths"]) for _ in range(count)]
    return ppo_work(
        SHAPES[settings["size"]],
        settings["vocabulary"],
        settings["prompt"],
        lengths,
        settings["epochs"],
        rank=LORA["r"] if settings["lora"] else 0,
        reward=REWARD,
        critic=side in WITH_CRITIC,
    )


def spread(values, digits):
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def row(settings, side, measured, rates):
    """A line of the table: medians, with the least and the most; ratios within each turn."""
    runs = [run for run in measured[side] if run]
    mode = "LoRA" if settings["lora"] else "full"
    what = f"{settings['size']}, {mode}, {'varying' if settings['varying'] else 'fixed'}"
    if not runs:
        return f"| {what} | {SIDES[side]} | out of memory |" + " |" * 7
    speed = [run["episodes"] / run["seconds"] for run in runs]
    turns = [(a, b) for a, b in zip(measured[side], measured.get("trl112", []), strict=False) if a and b]
    faster = peaks = phases = busy = ""
    if side != "trl112" and turns:
        faster = spread([b["seconds"] / b["episodes"] / (a["seconds"] / a["episodes"]) for a, b in turns], 2)
        peaks = spread([a["peak"] / b["peak"] for a, b in turns], 2)
    work, episodes = work_of(settings, runs[0], side), runs[0]["episodes"]
    limit = seconds_at(work, rates["head"], rates["backbone"]) / episodes
    if side in WITH_CRITIC:
        parts = [statistics.median(run["phases"][name] for run in runs) for name in ("generate", "logprobs")]
        parts.append(statistics.median(run["seconds"] for run in runs) - sum(parts))
        phases = " · ".join(f"{part / episodes:.2f}" for part in parts)
        busy = f"{sum(work['update']) / parts[-1] / rates['peak']:.2f}"
    cells = [what, SIDES[side], spread(speed, 3), faster, spread([run["peak"] for run in runs], 0), peaks, phases]
    cells += [f"{limit:.2f}", f"{1 / statistics.median(speed) / limit:.2f}", busy]
    return f"| {' | '.join(cells)} |"


def compare(args):
    for size in args.sizes:
        rates = measure("gemm", settings_of(size, args, gemm_rows=128 if args.device == "cpu" else 8192), args)
        rates["peak"] = args.peak_tflops * 1e12 if args.peak_tflops else rates["backbone"]
        print(
            f"{size}: {dict(zip(NAMES, WORK[size], strict=True))}, {SHAPES[size]}; FLOP/s {rates}\n\n{HEADER}",
            flush=True,
        )
        for mode in args.modes:
            for lengths in args.lengths:
                settings = settings_of(size, args, lora=mode == "lora", varying=lengths == "varying")
                measured = {side: [] for side in args.sides}
                for _ in range(args.repeats):
                    for side in args.sides:
                        measured[side].append(measure(side, settings, args))
                    both = [measured[side][-1] for side in ("ours", "trl112") if side in measured]
                    if len(both) == 2 and all(both):
                        check_equal(*both)
                for side in args.sides:
                    print(row(settings, side, measured, rates), flush=True)
        print(flush=True)


def exponent(xs, ys):
    """The slope of log y over log x: y grows as x to its power."""
    xs, ys = [math.log(x) for x in xs], [math.log(y) for y in ys]
    return statistics.linear_regression(xs, ys).slope


def growth(args):
    """Seconds of an episode of ours against one quantity at a time, the others as the first size has them."""
    size = args.sizes[0]
    print("| size, mode | grows | at | s an episode | exponent |\n|---|---|---|---|---|")
    for mode in args.modes:
        for name, factors in (("batch", (0.5, 1, 2)), ("response", (0.5, 1, 2)), ("vocabulary", (0.25, 1, 4))):
            points, seconds = [int(factor * settings_of(size, args)[name]) for factor in factors], []
            for point in points:
                settings = settings_of(size, args, lora=mode == "lora", **{name: point})
                runs = [measure("ours", settings, args) for _ in range(args.repeats)]
                seconds.append(statistics.median(run["seconds"] / run["episodes"] for run in runs))
            cells = ["/".join(f"{second:.3f}" for second in seconds), f"{exponent(points, seconds):.2f}"]
            print(f"| {size}, {mode} | {name} | {'/'.join(map(str, points))} | {' | '.join(cells)} |", flush=True)


def processes(args):
    """Episodes a second of the clock on one process and on two, with equal rollouts."""
    print("| size, mode | one process | two | ratio |\n|---|---|---|---|")
    for size in args.sizes:
        for mode in args.modes:
            turns = []
            for _ in range(args.repeats):
                settings = [settings_of(size, args, lora=mode == "lora", cpu_time=False, processes=n) for n in (1, 2)]
                runs = [measure("ours", each, args) for each in settings]
                turns.append([n * run["episodes"] / run["seconds"] for n, run in zip((1, 2), runs, strict=True)])
            one, two = zip(*turns, strict=True)
            ratio = spread([b / a for a, b in turns], 2)
            print(f"| {size}, {mode} | {spread(one, 3)} | {spread(two, 3)} | {ratio} |", flush=True)


def exported(args):
    """Seconds of `generate` by an exported policy and the SFT model; their weights have the same names and shapes."""
    print("| size, mode | SFT model, s | exported policy, s | ratio |\n|---|---|---|---|")
    for size in args.sizes:
        for mode in args.modes:
            settings = settings_of(size, args, lora=mode == "lora", turns=args.repeats)
            seconds = measure("exported", settings, args)
            ratio = spread([b / a for a, b in zip(seconds["sft"], seconds["exported"], strict=True)], 3)
            cells = [f"{size}, {mode}", *(spread(seconds[name], 3) for name in ("sft", "exported")), ratio]
            print(f"| {' | '.join(cells)} |", flush=True)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl112", help="Python of an environment with TRL 1.12.0")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--sizes", nargs="+", choices=WORK, help="default: small and medium; on cuda 0.5B and 1.5B")
    parser.add_argument("--modes", nargs="+", choices=["full", "lora"], default=["full", "lora"])
    parser.add_argument("--lengths", nargs="+", choices=["fixed", "varying"], default=["fixed", "varying"])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["trl112", "ours", "rloo", "grpo"])
    parser.add_argument("--batch", type=int, help="episodes of a rollout, if not the size's")
    parser.add_argument("--rollouts", type=int, default=3, help="the first one warms up")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--options", type=json.loads, default={}, help="more of our PPOConfig, as JSON")
    parser.add_argument(
        "--peak-tflops", type=float, help="of the device, for the last column: 989 for an H100 in bf16"
    )
    parser.add_argument("--profile", action="store_true", help="print what took most time to stderr")
    parser.add_argument("--short", action="store_true", help="see that it runs, on a tiny size")
    for part in (growth, processes, exported):
        parser.add_argument(f"--{part.__name__}", dest="part", action="store_const", const=part, help=part.__doc__)
    args = parser.parse_args()
    if args.short:
        args.sizes, args.modes, args.lengths, args.rollouts, args.repeats = ["tiny"], ["lora"], ["varying"], 2, 1
    if not args.trl112:
        args.sides = [side for side in args.sides if not side.startswith("trl112")]
    args.sizes = args.sizes or (["small", "medium"] if args.device == "cpu" else ["0.5B", "1.5B"])
    if args.rollouts < 2:
        parser.error(f"`--rollouts` must be at least 2, got {args.rollouts}: the first one warms up.")
    return args


def main():
    args = parse_args()
    (args.part or compare)(args)
    if args.device == "cuda":
        import torch

        machine = torch.cuda.get_device_name()
    else:
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        machine = f"one thread of {names[0].split(':')[1].strip() if names else platform.processor()}"
    print(f"\n{datetime.date.today()}, {machine}, {versions(args)}: `python {shlex.join(sys.argv)}`")


def versions(args):
    names = "torch", "transformers", "peft", "trl"
    code = f"from importlib.metadata import version; print(', '.join(f'{{n}} {{version(n)}}' for n in {names}))"
    pythons = {sys.executable: "ours", args.trl112: "TRL 1.12"} if args.trl112 else {sys.executable: "ours"}
    found = {
        side: subprocess.check_output([python, "-c", code], text=True).strip() for python, side in pythons.items()
    }
    return "; ".join(f"{side} {names}" for side, names in found.items())


if __name__ == "__main__":
    main()
