"""What share of a run's time `HackWatch` takes, in one of the demo's runs: its models are tiny, so no share is larger.

python -m benchmarks.watch_cost --rollouts 8
"""

import argparse
import time
from pathlib import Path

from recipes import ppo
from recipes.demo.stages import DemoArguments, recipe_arguments, use_one_thread
from trl_ext.callbacks import HackWatch

EVENTS = ("on_train_begin", "on_step_end", "on_log", "on_evaluate")


def timed(method, spent):
    """The same method, whose CPU seconds are counted."""

    def run(*args, **kwargs):
        begin = time.process_time()
        try:
            return method(*args, **kwargs)
        finally:
            spent.append(time.process_time() - begin)

    return run


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.watch_cost", description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=8, help="of 128 answers; the first one is not counted")
    parser.add_argument("--output_dir", default="outputs/watch_cost")
    args = parser.parse_args(arguments)
    use_one_thread()
    words = recipe_arguments(DemoArguments(output_dir=args.output_dir), "unguarded", "ppo")
    words += ["--total_episodes", str(128 * args.rollouts), "--output_dir", f"{args.output_dir}/run"]
    words += ["--eval_strategy", "no", "--save_strategy", "no", "--resume_from_checkpoint", "false"]
    spent: list[float] = []
    for name in EVENTS:
        setattr(HackWatch, name, timed(getattr(HackWatch, name), spent))
    steps, watches = [], HackWatch.on_step_end
    HackWatch.on_step_end = lambda *args, **kwargs: (watches(*args, **kwargs), steps.append(time.process_time()))[0]
    ppo.main(words)
    first = len(steps) // args.rollouts  # the first rollout imports and allocates
    calls = sum(sorted(spent)[:-1])  # without the first reading of texts, which imports `regex`
    total = steps[-1] - steps[first]
    print(f"HackWatch {calls:.3f} s of {total:.1f} s: {calls / total:.2%} ({Path(args.output_dir)})")


if __name__ == "__main__":
    main()
