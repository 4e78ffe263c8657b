"""Run the whole pipeline, and a reward hack, offline in minutes: SFT → reward model → PPO with and without guard
rails.

    trl-ext demo --seed 0

The task is a simulated customer-support desk, whose texts a small grammar makes (world.py), so the true quality of an
answer, its gold score, is known. A phrase that has nothing to do with quality was planted into the reward model's
data. The report shows how PPO exploits it. The same command again resumes where it stopped. `--stage NAME`, such as
`--stage online_dpo`, builds only that stage and the stages that it needs.
"""

if __name__ == "__main__":  # before the libraries that are imported next
    from trl_ext.upstream import quiet

    quiet()

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import datasets
from accelerate import PartialState
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

from trl_ext import StrictTrlParser, load_dataset_split
from trl_ext.runs import Hold, setting
from trl_ext.upstream import quiet

from . import stages
from .measure import measure
from .report import write_report


@dataclass
class RunArguments(stages.DemoArguments):
    """Declare the arguments of `trl-ext demo`, for the whole demo or one of its stages."""

    stage: Literal["world", "sft", "reward", "guarded", "unguarded", "ppo_lora", "online_dpo"] | None = setting(
        None, "Build only this stage and those that it needs, without a report."
    )


def build(args: stages.DemoArguments, name: str) -> Path:
    """Build a stage, unless it is complete; return its folder."""
    stage = getattr(stages, f"{name}_stage", None)
    return stage(args) if stage else stages.ppo_stage(args, name)


def run(args: stages.DemoArguments) -> str:
    """Build the stages that are missing, measure the policies, and write the report; return the summary."""
    steps = ("world", "sft", "reward", "guarded", "unguarded")
    for number, name in enumerate(steps, 1):
        done = (args.folder / name / stages.MARKER).is_file()
        print(f"[{number}/{len(steps)}] {name}{': complete already' if done else ''}", flush=True)
        build(args, name)

    rows = load_dataset_split(args.folder / "world" / "prompts", "test").to_list()
    tokenizer = AutoTokenizer.from_pretrained(args.folder / "sft")
    reference = AutoModelForCausalLM.from_pretrained(args.folder / "sft")
    reward_model = AutoModelForSequenceClassification.from_pretrained(args.folder / "reward", num_labels=1)
    measured = {}
    for name in ("sft", "guarded", "unguarded"):
        policy = AutoModelForCausalLM.from_pretrained(args.folder / name)
        measured[name] = measure(policy, reference, reward_model, tokenizer, rows, args.seed)
    durations = {name: stages.seconds(args.folder / name) for name in steps}
    settings = {"Seed": args.seed, "planted share": args.planted_share, "label noise": args.label_noise}
    if args.short:
        settings["--short:"] = "too short to show anything: what holds here means nothing"
    return write_report(args.folder, rows, measured, durations, settings)


def main(arguments: list[str] | None = None) -> None:
    parser = StrictTrlParser(RunArguments, prog="trl-ext demo", description=__doc__)
    (args,) = parser.parse_args_and_config(arguments)
    quiet()
    datasets.disable_progress_bars()  # a table of the stages says more
    logging.disable_progress_bar()
    start = time.time()
    stages.use_one_thread()
    try:
        with Hold(args.folder):
            if args.stage:
                PartialState().print(f"{args.stage}: {build(args, args.stage)} ({time.time() - start:.0f} s)")
                return
            summary = run(args)
    except (ValueError, OSError) as error:
        parser.error(f"{error}; complete stages are kept, and the same command continues with the next")
    if args.short:
        summary += (
            "\n\nThis was a `--short` run: it takes all steps, but is too short to show anything. The claims are of "
            "the whole demo."
        )
    page = args.folder / "report.html"
    print(f"\n{summary}\n\nReport: {page} ({time.time() - start:.0f} s), with links to each stage's page")
    flags = "--prompt 'hello , my lamp gets too hot . what can i do . <agent>' --max_new_tokens 48"
    print(f"Next: trl-ext generate --model_name_or_path {args.folder / 'guarded'} {flags}")


if __name__ == "__main__":
    main(sys.argv[1:])
