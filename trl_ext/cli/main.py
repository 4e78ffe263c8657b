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
from typing import Any

import trl_ext

from ..runs import accelerate_file, config_file, did_you_mean, find, recipe
from ..upstream.packages import NO_DEEPSPEED, is_of_deepspeed
from ..upstream.terminal import quiet

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
    "merge": "make an adapter a plain model",
    "plan": "say what a run takes, memory and time, before it is started",
    "advise": "say what to train next, or to label more first, and why",
    "label": "label pairs of answers by a judge that is compared with people first",
    "constitution": "have a model revise its answers by principles, for SFT rows and pairs",
    "annotators": "say how far annotators agree, and make pairs of their labels",
    "prompts": "report on duplicates, leaks and lengths of prompts, and write filtered copies",
    "reward-report": "test a reward model before it is trusted: accuracy, calibration, probes",
    "evaluate": "compare what policies answer to the same held-out prompts: scores, win rates, KL",
    "refresh-reward": "queue a policy's answers for labels, and train its reward model on with them",
    "serve-reward": "score completions of other processes and machines, over HTTP",
    "report": "write the page of a run, or of several",
    "demo": "train on a small made-up world, with and without guard rails, in minutes",
    "doctor": "say what is installed, what is missing, and how to get it",
}
_COMMANDS = {
    "advise": "workbench.planning.advice",
    "annotators": "workbench.labels.command",
    "constitution": "workbench.feedback.constitution",
    "doctor": "cli.doctor",
    "evaluate": "workbench.evaluate.command",
    "label": "workbench.feedback.command",
    "prompts": "workbench.prompts.command",
    "report": "workbench.pages.report",
    "reward-report": "workbench.reward_report.command",
    "serve-reward": "workbench.serving.command",
}
_TRAINS_TOO = ("demo", "refresh-reward")
_OF_BOTH = {"debug", "gradient_accumulation_steps"}  # flags of accelerate that the recipes have, too, and get
_KEEPS = ("constitution", "evaluate", "label")
_INTERRUPTED = 128 + signal.SIGINT


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit status."""
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
        nearest = did_you_mean(name, TRAINING | TOOLS) or "; `trl-ext --help` lists them"
        return _refused("trl-ext", f"there is no command {command!r}{nearest}")
    if name in TRAINING and not rest:
        print((recipe(_script(name)).__doc__ or "").strip(), file=sys.stderr)
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


def _script(name: str) -> str:
    """Return the recipe that a command runs, as its dotted name within `recipes`."""
    return "demo.run" if name == "demo" else name.replace("-", "_")


def run_here(name: str, arguments: list[str]) -> int:
    """Run a command in this process."""
    sys.argv = [f"trl-ext {name}", *arguments]  # what parsers call the program
    try:
        if name in _COMMANDS:
            import_module(f"trl_ext.{_COMMANDS[name]}").main(arguments)
        else:
            recipe(_script(name)).main(arguments)
    except BrokenPipeError:
        if name in TRAINING or name in _TRAINS_TOO:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # who read the rest is gone, as in `| head`
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt as error:
        if os.environ.get("RANK", "0") == "0":
            again = " The same command continues with what is not done yet." if name in _KEEPS else ""
            if name in TRAINING or name in _TRAINS_TOO:
                again = f" {error}" if str(error) else " The same command resumes from the newest checkpoint, if any."
            print(f"\nInterrupted.{again}", file=sys.stderr)
        return _INTERRUPTED
    return 0


def start(name: str, arguments: list[str]) -> int:
    """Start a training command through accelerate and return its exit status."""
    try:
        file, launch_flags, flags = split(arguments)
        settings = launch_file(file, launch_flags) if file else multi_gpu_flag(launch_flags)
        return _launch(name, [*settings, *launch_flags], flags)
    except KeyboardInterrupt:  # before the training process, which would print it, was started
        return _INTERRUPTED
    except (ValueError, OSError, ImportError, LookupError, AssertionError, argparse.ArgumentError) as error:
        return _refused(f"trl-ext {name}", NO_DEEPSPEED if is_of_deepspeed(error) else str(error))


def split(arguments: list[str]) -> tuple[Path | None, list[str], list[str]]:
    """
    Divide a command line into words for accelerate and words for the recipe. A flag's values go with the flag.

    Returns:
        Three values: the path of accelerate's configuration, or None; accelerate's words; the recipe's words.

    Raises:
        OSError: a configuration file that the command line names does not exist.
    """
    from ..upstream.names import launch_command_parser

    of_accelerate = {action.dest for action in launch_command_parser()._actions} - _OF_BOTH
    files = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    files.add_argument("--accelerate_config", "--accelerate-config", "--config_file", "--config-file")
    given, words = files.parse_known_args(arguments)
    file = given.accelerate_config and accelerate_file("--accelerate_config", given.accelerate_config)
    mine: list[str] = []
    theirs: list[str] = []
    part = mine
    for word in words:
        if word.startswith("--"):
            part = theirs if word[2:].partition("=")[0].replace("-", "_") in of_accelerate else mine
        part.append(word)
    recipes = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    recipes.add_argument("--config", action="append", default=[])
    for path in recipes.parse_known_args(mine)[0].config:
        config_file("--config", path)
    return file, theirs, mine


def launch_file(file: Path, flags: list[str]) -> list[str]:
    """
    Return the flags that make accelerate read `file`, and the DeepSpeed file that `file` may name.

    [`multi_gpu_flag`] is added to them. Raise a `ValueError` if there is no such DeepSpeed file.
    """
    words, config = ["--config_file", str(file)], _read(file)
    named = (config.get("deepspeed_config") or {}).get("deepspeed_config_file")
    if named and not any(flag.startswith("--deepspeed_config_file") for flag in flags):
        if not find(named).is_file():
            raise ValueError(f"{file} names deepspeed_config_file {named}, which is not there: correct the path")
        words += ["--deepspeed_config_file", str(find(named))]
    return [*words, *multi_gpu_flag(flags, config)]


def multi_gpu_flag(flags: list[str], config: dict[str, Any] | None = None) -> list[str]:
    """
    Return ["--multi_gpu"] if accelerate would otherwise ignore `--num_processes` and start one process; else [].

    Args:
        flags: accelerate's flags.
        config: accelerate's configuration; None reads the user's own file, which `accelerate config` writes.

    Raises:
        ValueError: the flags have `--cpu`, under which accelerate starts only one process.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--num_processes", "--num-processes", type=int, default=1)
    asked = parser.parse_known_args(flags)[0].num_processes
    if asked < 2:
        return []
    if config is None:
        from accelerate.commands.config.config_args import default_config_file

        config = _read(Path(default_config_file)) if Path(default_config_file).is_file() else {}
    if config.get("distributed_type") not in (None, False, "NO"):
        return []
    given = {flag.partition("=")[0].replace("-", "_") for flag in flags}
    if "__cpu" in given:
        raise ValueError(f"`--cpu` starts one process, not {asked}: leave it out, and give `--use_cpu true`")
    ways = {"__multi_gpu", "__tpu", "__use_deepspeed", "__use_fsdp", "__use_megatron_lm", "__mpirun_hostfile"}
    return [] if ways & given else ["--multi_gpu"]


def _read(file: Path) -> dict[str, Any]:
    import yaml

    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is not valid YAML: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} must be a mapping of names to values, got {type(config).__name__}")
    return config


def _launch(name: str, launch_flags: list[str], flags: list[str]) -> int:
    import torch
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from ..upstream.names import SignalException, launch_command_parser, launch_training_script

    parser, script = launch_command_parser(), str(Path(__file__).with_name("process.py"))
    parser.exit_on_error = False
    parsed = parser.parse_args([*launch_flags, script])
    if (taken := parsed.training_script) != script:
        raise ValueError(f"stray value {taken!r}: the flag of `accelerate launch` before it takes fewer values")
    if parsed.multi_gpu and not torch.accelerator.is_available():
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
    """Pass a signal such as `kill -INT` on to the training process; a terminal's Ctrl-C, sent to both, counts once."""
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
