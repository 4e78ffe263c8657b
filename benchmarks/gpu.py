"""
PPO with a critic on one GPU, beside TRL's GRPOTrainer on the same completions: seconds, MFU and memory by phase.

    python -m benchmarks.gpu                             # all rows, in some 4 minutes, the most telling first
    python -m benchmarks.gpu --device cpu --sizes tiny   # see that it runs
    python -m benchmarks.gpu --table gpu.jsonl           # print the table of rows that were measured elsewhere
    python -m benchmarks.gpu_parts                       # the LM head, attention and generation, by several ways

Models have the shapes of Qwen2.5 and random weights, drawn on the device: nothing is downloaded. A rollout has 64
completions of up to 512 tokens to prompts of 512: 64 prompts for PPO, 8 prompts with 8 completions each for GRPO. Then
come four optimizer steps of 16 completions, in micro-batches of 8, one epoch. LoRA has rank 16 on all linear layers;
7B recomputes activations. Both sides keep a reference. The reward is a function that costs nothing, so that it is PPO
that is measured; in the rows with a reward model this is one more adapter on the base, which is read from disk and,
for QLoRA, quantised to 4 bits. Completions are random tokens, since both sides generate by transformers; with
`--draws` the policy draws them, and a logits processor ends each at its length. `fixed` are 512 tokens each, `varying`
512 · u² tokens with u spread evenly, a third on average.

A row is written to a file as soon as it is known. A short rollout warms up (16 tokens); the second one counts. Phases
are cut by `torch.cuda.synchronize`; memory is `torch.cuda.max_memory_allocated`. What the plan predicts is for full
length, so compare it where lengths are fixed.

**MFU** is a phase's FLOPs / (seconds · peak of the card). FLOPs are those of the matrix products that the work needs,
by benchmarks/flops.py: with n = prompt + completion − 1 real tokens in a row, each layer's linears take 2·n·(weights),
attention 4·d·n·(n + 1)/2 (causal), the LM head 2·d·V at completion tokens only. A backward pass takes as much again
for each factor that needs a gradient: twice the forward for trained weights, once for frozen ones (LoRA). Nothing is
counted for padding, recomputation, old log-probs, element-wise work and the optimizer.
"""

import argparse
import gc
import json
import platform
import tempfile
import time
import traceback
from pathlib import Path

from .flops import ppo_work
from .gpu_row import LORA, MODES, SHAPES, SIDES, is_lora, measure, planned_bytes

PEAKS = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "A100": 312e12}  # FLOP/s, dense bf16
ROWS = [  # mode, lengths, side, without: the most telling first
    *(("lora-1.5B", "varying", side, "") for side in ("critic", "grpo")),
    ("lora-1.5B", "varying", "critic", "varlen, kernel"),
    *(("lora-1.5B", "fixed", side, "") for side in ("critic", "grpo")),
    *(("lora-7B", "varying", side, "") for side in ("critic", "grpo")),
    *((mode, "fixed", "roles", "") for mode in ("lora-7B", "qlora-7B")),
    *(("full-0.5B", "fixed", side, "") for side in ("critic", "grpo")),
    *(("full-0.5B", "fixed", "critic", without) for without in ("kernel", "varlen")),
    *(("full-0.5B", "varying", side, "") for side in ("critic", "grpo")),
    *((mode, "varying", "mean", "") for mode in ("lora-1.5B", "full-0.5B", "lora-7B")),
]


def run(settings):
    """Measure one row; return it, or what went wrong."""
    import torch

    try:
        with tempfile.TemporaryDirectory() as folder:
            return measure(settings, folder)
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}
    except Exception:
        return {"error": traceback.format_exc()}
    finally:
        gc.collect()
        if settings["device"] == "cuda":
            torch.cuda.empty_cache()


def flops(row):
    """FLOPs of each phase, by the lengths that were drawn."""
    settings = row["settings"]
    shape = SHAPES[settings["size"]]
    work = ppo_work(
        shape,
        shape["vocab_size"],
        settings["prompt"],
        row["lengths"],
        epochs=1,
        rank=LORA["r"] if is_lora(settings) else 0,
        reward=shape if settings["side"] == "roles" else None,
        critic=settings["side"] in ("critic", "roles"),
    )
    return {phase: sum(work[name]) for phase, name in zip(PHASES, work, strict=True)}


PHASES = ("generation", "passes", "update")
HEADER = (
    "| model, lengths | side | generation, s (MFU) | passes, s (MFU) | update, s (MFU) | completion tokens / s "
    "| ÷ GRPO | peak, GiB: generation · passes · update | ÷ GRPO | planned, GiB |\n" + "|---" * 10 + "|"
)


def table(rows):
    """Print the rows that were measured; a ratio is to GRPO on the same work in the same run."""
    done = {
        tuple(row["settings"][name] for name in ("mode", "lengths", "side")): row for row in rows if "seconds" in row
    }
    lines = [HEADER]
    for row in rows:
        settings = row["settings"]
        names = [
            f"{settings['mode']}, {settings['lengths']}",
            SIDES[settings["side"]] + f" without {settings['without']}" * bool(settings["without"]),
        ]
        if "error" in row:
            lines.append(f"| {' | '.join(names)} | {row['error'].splitlines()[-1][:200]}" + " |" * 8)
            continue
        grpo, needed = done.get((settings["mode"], settings["lengths"], "grpo")), flops(row)
        cells = [""] * (not settings["draws"])
        for phase in PHASES[not settings["draws"] :]:
            mfu = needed[phase] / row["seconds"][phase] / row["peak_flops"] if row["peak_flops"] else float("nan")
            cells.append(f"{row['seconds'][phase]:.2f} ({mfu:.1%})")
        speed = speed_of(row)
        cells += [f"{speed:,.0f}", f"{speed / speed_of(grpo):.2f}" if grpo else ""]
        cells += [" · ".join(f"{row['bytes'][phase] / 2**30:.1f}" for phase in PHASES)]
        peak, other = max(row["bytes"].values()), max(grpo["bytes"].values()) if grpo else 0
        cells += [f"{peak / other:.2f}" if other else ""]
        cells += [f"{row['planned'] / 2**30:.1f}" if "planned" in row else ""]
        lines.append(f"| {' | '.join(names + cells)} |")
    return "\n".join(lines)


def speed_of(row):
    return sum(row["lengths"]) / sum(row["seconds"].values())


def versions():
    """What is there of the torch that trl_ext is tested with, so that a figure can be read."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for name in ("torch", "triton", "transformers", "trl", "peft", "accelerate", "flash-attn", "kernels"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=["0.5B", "1.5B", "7B"])
    parser.add_argument("--lengths", nargs="+", choices=["fixed", "varying"], default=["fixed", "varying"])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--micro", type=int, help="rows of a micro-batch on both sides; 8 if unset")
    parser.add_argument("--draws", action="store_true", help="draw the completions; else they are random tokens")
    parser.add_argument("--options", type=json.loads, default={}, help="more of our PPOConfig, as JSON")
    parser.add_argument("--seconds", type=float, default=420, help="begin no row that may end later")
    parser.add_argument("--out", type=Path, default=Path("gpu.jsonl"))
    parser.add_argument("--table", type=Path, help="rows that were measured before; nothing is run but the plan")
    args = parser.parse_args()
    if args.table:
        rows = [json.loads(line) for line in args.table.read_text().splitlines()]
        for row in rows:
            if row["settings"]["side"] != "grpo" and "seconds" in row:
                row["planned"] = planned_bytes(row["settings"])
        print(table(rows))
        return

    start, rows, spent = time.monotonic(), [], [0.0]
    print(json.dumps(versions()), flush=True)
    wanted = [row for row in ROWS if MODES[row[0]]["size"] in args.sizes] or [
        ("lora-tiny", "varying", side, "") for side in SIDES
    ]
    for mode, lengths, side, without in wanted:
        if side not in args.sides or lengths not in args.lengths:
            continue
        began = time.monotonic()
        if began - start + max(spent[-3:]) > args.seconds:
            print(f"no time is left for {mode}, {lengths}, {side} {without}", flush=True)
            continue
        settings = {"mode": mode, "lengths": lengths, "side": side, "without": without}
        settings["draws"] = args.draws and side != "roles"  # its policy is read from disk
        settings |= {"device": args.device, "options": args.options, **MODES[mode]}
        settings["micro"] = args.micro or settings["micro"]
        row = {"settings": settings, **run(settings)}
        if "gpu" in row:
            row["peak_flops"] = next((peak for name, peak in PEAKS.items() if name in row["gpu"]), None)
        spent.append(time.monotonic() - began)
        rows.append(row)
        with args.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        found = row.get("error") or {name: round(each, 2) for name, each in row["seconds"].items()}
        print("row:", mode, lengths, side, without, found, f"{spent[-1]:.0f} s", flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
