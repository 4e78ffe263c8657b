"""Run recipes and tools from any folder, by `trl-ext COMMAND`.

Training commands start through accelerate, other commands run in this process.
"""

import argparse
import logging
import os
import signal
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import trl_ext

from ..runs import accelerate_file, did_you_mean, find, recipe
from ..upstream.packages import OPTIONAL, quiet

TRAINING = {
    "sft": "fine-tune a language model on demonstrations",
    "reward": "train a reward model on preference pairs",
    "pretrain-critic": "train PPO's critic on saved answers and their scores, before PPO",
    "ppo": "train with PPO against reward models and functions",
    "dpo": "train with DPO on preference pairs",
    "online-dpo": "train with DPO on pairs of the policy's own answers",
}
TOOLS = {
    "generate": "answer prompts with a trained model",
    "merge": "merge an adapter into its base model",
    "plan": "say how much memory and time a run will take",
    "advise": "say what to train next, or whether to label more first, and why",
    "label": "label pairs of answers with a judge that is first compared with people",
    "constitution": "have a model revise its answers by principles, and write SFT rows and pairs",
    "annotators": "say how far annotators agree, and make pairs of their labels",
    "prompts": "report on duplicates, leaks and lengths of prompts, and write filtered copies",
    "reward-report": "test a reward model before you trust it: accuracy, calibration, probes",
    "evaluate": "compare policies on the same held-out prompts: scores, win rates, KL",
    "refresh-reward": "queue a policy's answers for labelling, and train its reward model further on the labels",
    "serve-reward": "score completions of other processes and machines, over HTTP",
    "report": "write the page of a run, or of several",
    "demo": "train on a small made-up world, with and without guard rails, in minutes",
    "doctor": "say what is installed, what is missing, and how to get it",
}
_MODULES = {  # commands that are no recipes
    "advise": "workbench.planning.advice",
    "annotators": "workbench.labels.command",
    "constitution": "workbench.feedback.constitution",
    "doctor": "cli.doctor",
    "evaluate": "workbench.reports.evaluate",
    "label": "workbench.feedback.command",
    "prompts": "workbench.reports.prompts",
    "report": "workbench.pages.report",
    "reward-report": "workbench.reports.reward_report",
    "serve-reward": "workbench.feedback.serving",
}
_RESUMES = {*TRAINING, "demo", "refresh-reward", "constitution", "evaluate", "label"}
_OF_BOTH = {"debug", "gradient_accumulation_steps"}  # flags of accelerate that the recipes have, too, and get
_INTERRUPTED = 128 + signal.SIGINT


def main(arguments: list[str] | None = None) -> int:
    """
    Run a command and return its exit status. `arguments` are the words after `trl-ext`; None reads them from the
    command line.
    """
    quiet()
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if command in ("-h", "--help"):
        print(usage())
        return 0
    if command == "--version":
        print(f"trl-ext {trl_ext.__version__}")
        return 0
    name = command.replace("_", "-")
    if name not in TRAINING | TOOLS:
        nearest = did_you_mean(name, TRAINING | TOOLS)
        return _refused("trl-ext", f"there is no command {command!r}{nearest or '; `trl-ext --help` lists them'}")
    if name in TRAINING and not rest:
        print((_recipe(name).__doc__ or "").strip(), file=sys.stderr)
        return 2
    is_launched = name in TRAINING and not {"-h", "--help"} & {*rest}
    return start(name, rest) if is_launched else run_here(name, rest)


def usage() -> str:
    lines = ["usage: trl-ext COMMAND [--FLAG VALUE ...]", "", "Training, through `accelerate launch`:"]
    lines += [f"  {name:<17}{what}" for name, what in TRAINING.items()]
    lines += ["", "Tools:", *(f"  {name:<17}{what}" for name, what in TOOLS.items()), ""]
    lines += [
        "`trl-ext COMMAND --help` has a command's flags. --config takes a file or a recipe that ships, such as",
        "tinystories/ppo; --accelerate_config a file or a configuration that ships, such as fsdp2. Flags of",
        "`accelerate launch` are passed on: trl-ext ppo --config FILE --accelerate_config fsdp2 --num_processes 4",
    ]
    return "\n".join(lines)


def _recipe(name: str) -> ModuleType:
    return recipe("demo.run" if name == "demo" else name.replace("-", "_"))


def run_here(name: str, arguments: list[str]) -> int:
    """Run the command `name` with the `arguments` after it in this process; return its exit status."""
    sys.argv = [f"trl-ext {name}", *arguments]  # what parsers call the program
    try:
        module = import_module(f"trl_ext.{_MODULES[name]}") if name in _MODULES else _recipe(name)
        module.main(arguments)
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL:
            raise
        return _refused(sys.argv[0], f"{error.name} is not installed: `pip install {OPTIONAL[error.name][1]}`")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # who read the rest is gone, as in `| head`
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt as error:
        if os.environ.get("RANK", "0") == "0":
            again = "The same command resumes from what is complete." if name in _RESUMES else ""
            print(f"\nInterrupted. {error if str(error) else again}", file=sys.stderr)
        return _INTERRUPTED
    return 0


def start(name: str, arguments: list[str]) -> int:
    """Start the training command `name` through accelerate, with these `arguments`; return its exit status."""
    try:
        launch_flags, flags = split(arguments)
        return _launch(name, launch_flags, flags)
    except KeyboardInterrupt:  # before the training process, which would print it, was started
        return _INTERRUPTED
    except (ValueError, OSError, ImportError, argparse.ArgumentError) as error:
        return _refused(f"trl-ext {name}", str(error))


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """
    Split a command line into accelerate's arguments and the recipe's. A flag's values stay with the flag.

    Accelerate's arguments also get the path of the file that `--accelerate_config` names, and of the DeepSpeed file
    that the configuration names. If neither a flag nor the configuration says how to distribute several processes,
    `--multi_gpu` is added: without it accelerate would start only one process.
    """
    import yaml
    from accelerate.commands.config.config_args import default_config_file

    from ..upstream.names import launch_command_parser

    of_accelerate = {action.dest for action in launch_command_parser()._actions} - _OF_BOTH
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--accelerate_config", "--accelerate-config", "--config_file", "--config-file")
    given, words = parser.parse_known_args(arguments)
    mine: list[str] = []
    theirs: list[str] = []
    part = mine
    for word in words:
        if word.startswith("--"):
            part = theirs if word[2:].partition("=")[0].replace("-", "_") in of_accelerate else mine
        part.append(word)
    parser.add_argument("--num_processes", "--num-processes", type=int, default=1)
    processes = parser.parse_known_args(theirs)[0].num_processes
    file = Path(default_config_file)  # the user's own, which `accelerate config` writes
    if given.accelerate_config:
        file = accelerate_file("--accelerate_config", given.accelerate_config)
        theirs += ["--config_file", str(file)]
    config = (yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else None) or {}
    flags = {word.partition("=")[0].replace("-", "_") for word in theirs}
    if (
        named := config.get("deepspeed_config", {}).get("deepspeed_config_file")
    ) and "__deepspeed_config_file" not in flags:
        theirs += ["--deepspeed_config_file", str(find(named))]
    ways = {"__multi_gpu", "__tpu", "__use_deepspeed", "__use_fsdp", "__use_megatron_lm", "__mpirun_hostfile"}
    if processes > 1 and config.get("distributed_type") in (None, False, "NO") and not ways & flags:
        theirs.append("--multi_gpu")
    return theirs, mine


def _launch(name: str, launch_flags: list[str], flags: list[str]) -> int:
    import torch
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from ..upstream.names import SignalException, launch_command_parser, launch_training_script

    parser = launch_command_parser()
    script = str(Path(trl_ext.__file__).with_name("__main__.py"))
    parser.exit_on_error = False  # `start` prints the error
    if "--multi_gpu" in launch_flags and not torch.accelerator.is_available():
        os.environ["ACCELERATE_USE_CPU"] = "true"  # else each process would take itself for the only one
    # accelerate lists the defaults that it takes, which tells a user nothing
    logging.getLogger("accelerate.commands.launch").addFilter(
        lambda record: "not passed to" not in record.getMessage()
    )
    # The training process prints that it was interrupted, and ends; this one waits for it
    before = signal.signal(signal.SIGINT, _pass_on)
    try:
        launch_training_script(script, launch_flags, [name, *flags], launch_parser_fn=lambda: parser)
    except subprocess.CalledProcessError as error:
        return error.returncode if error.returncode >= 0 else 128 - error.returncode
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code >= 0 else 128 - code
    except SignalException:
        return _INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, before)
    return 0


def _pass_on(number: int, frame: Any) -> None:
    """Pass a signal on to the training process."""
    import psutil

    children = psutil.Process().children()
    if not children:  # it has not been started yet
        raise KeyboardInterrupt
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.send_signal(number)


def _refused(program: str, why: str) -> int:
    print(f"{program}: error: {' '.join(why.split())}", file=sys.stderr)
    return 2
