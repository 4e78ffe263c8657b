"""How well the monitors see a hack coming: detection rate, lead and false alarms, measured on the demo's world.

    python -m tests.benchmarks.monitors --output_dir outputs/monitors

Trains PPO policies over seeds, planted shares and KL coefficients, with gold measured all along, caches each run's log
as JSON, and replays the logs through the monitors. The same command again goes on where it stopped; with all logs
there it only replays.
"""

import json
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

from recipes.demo.stages import DemoArguments, ppo_stage, seconds, sft_stage, use_one_thread
from trl_ext import StrictTrlParser

# (planted share, run): guarded.yaml, or unguarded.yaml with a fixed KL coefficient
GRID = ((0.2, "guarded"), (0.2, "0"), (0.2, "0.2"), (0.0, "0.1"), (0.2, "0.05"), (0.0, "0"))
OPTIONS = """
    --reward_funcs recipes.demo.world.gold_reward recipes.demo.world.phrase_reward trl_ext.rewards.repetition_watch
    --reward_weights 1 0 0 0 --per_device_train_batch_size 32 --num_mini_batches 4 --learning_rate 1e-4
    --logging_steps 4 --eval_steps 32 --save_steps 320 --total_episodes 5120
""".split()


@dataclass
class BenchmarkArguments:
    """Which runs."""

    seeds: list[int] = field(
        default_factory=lambda: list(range(6)),
        metadata={"help": "Seeds of world and training: defaults are chosen on the even ones, reported on the odd."},
    )
    output_dir: str = field(default="outputs/monitors", metadata={"help": "Folder of runs, logs and the table."})
    short: bool = field(default=False, metadata={"help": "Take the same way in minutes, and show nothing."})


def make_log(folder: Path, seed: int, share: float, name: str, short: bool = False) -> dict:
    """Train one run, or read its log: `{"run", "seed", "share", "seconds", "log_history"}`."""
    path = folder / "logs" / f"seed-{seed}-share-{share:g}-{name}.json"
    if path.is_file():
        return json.loads(path.read_text())
    demo = DemoArguments(seed, str(folder / f"planted-{share:g}"), planted_share=share, short=short)
    twin = next(iter(sorted(folder.glob(f"planted-*/seed-{seed}/sft/demo_complete.json"))), None)
    if twin is not None and not (demo.folder / "sft").exists():  # demonstrations do not depend on the planted share
        shutil.copytree(twin.parent, demo.folder / "sft")
    sft_stage(demo)
    guarded = name == "guarded"
    options = OPTIONS + ([] if guarded else ["--kl_coef", name])
    run = ppo_stage(demo, "guarded" if guarded else f"unguarded-{name}", [] if short else options)
    states = sorted(run.glob("checkpoint-*/trainer_state.json"), key=lambda p: int(p.parent.name.split("-")[1]))
    history = json.loads(states[-1].read_text())["log_history"]
    log = {"run": name, "seed": seed, "share": share, "seconds": seconds(run), "log_history": history}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".tmp").write_text(json.dumps(log))
    path.with_suffix(".tmp").replace(path)
    return log


def main(arguments: list[str] | None = None) -> None:
    parser = StrictTrlParser(BenchmarkArguments, prog="python -m tests.benchmarks.monitors", description=__doc__)
    (args,) = parser.parse_args_and_config(arguments)
    use_one_thread()
    folder, logs = Path(args.output_dir), []
    for seed in args.seeds:
        for share, name in GRID:
            print(f"seed {seed}, planted share {share:g}, {name}", flush=True)
            logs.append(make_log(folder, seed, share, name, args.short))


if __name__ == "__main__":
    main(sys.argv[1:])
