"""Launch two gloo processes, forked from one that has imported: imports take longer than most runs."""

import functools
import gc
import importlib
import importlib.metadata
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import types
from pathlib import Path

import accelerate
import httpcore2
import jinja2
import torch
import torch.distributed.run
from accelerate.commands.launch import launch_command, launch_command_parser


def spare_time():
    """
    Keep libraries from repeating the same work.

    At each training accelerate collects garbage, which Python does anyway, and parses the metadata of packages
    hundreds of times, to know whether they are installed; here it does so once. TRL compiles a template for each
    checkpoint. Each HTTP client loads all certificates. And each seed is kept, with its traceback, for absent devices.
    """
    accelerate.utils.memory.gc = types.SimpleNamespace(collect=lambda: None)
    httpcore2.default_ssl_context = functools.cache(httpcore2.default_ssl_context)
    jinja2.Environment.compile = functools.cache(jinja2.Environment.compile)
    importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
    for absent in (device for device in (torch.cuda, torch.mtia, torch.xpu) if not device.is_available()):
        absent.manual_seed_all = lambda seed: None
    gc.freeze()  # imported modules stay
    gc.enable()


def on_two_processes(*runs):
    """
    Run each (module, folder, *arguments) on two processes, one after the other; a module gets arguments and folder.

    Return for each what the two processes saved as `folder/process <rank>.pt`.
    """
    words = [shlex.join([module, *arguments, str(folder)]) for module, folder, *arguments in runs]
    run = subprocess.run(
        [sys.executable, "-m", "tests.launch", *words],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stderr[-20000:]
    return [[torch.load(run[1] / f"process {rank}.pt", weights_only=False) for rank in range(2)] for run in runs]


def accelerated(file, *run):
    """Do what `accelerate launch --config_file FILE -m MODULE …` does, with processes that `fork` starts."""
    torch.distributed.run.run = lambda args: fork(run)
    launch_command(launch_command_parser().parse_args(["--config_file", file, "--main_process_port", "0", "-m", *run]))


def fork(*runs):
    """Do what torchrun does, but import once: fork two processes that do all runs; end both if one fails."""
    gc.disable()
    for module, *_ in runs:
        importlib.import_module(module)
    spare_time()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = set()
    for rank in ("0", "1"):
        if not (child := os.fork()):
            os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            for sys.argv in map(list, runs):
                module = sys.argv[0]
                del sys.modules[module]  # it runs again, as `__main__`
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            sys.exit()
        running.add(child)
    failed = False
    while running:
        child, status = os.wait()
        running.discard(child)
        if status and not failed:
            failed = True
            for other in running:
                os.kill(other, signal.SIGTERM)
    sys.exit(failed)


if __name__ == "__main__":
    if sys.argv[1] == "--config_file":
        accelerated(*sys.argv[2:])
    else:
        fork(*map(shlex.split, sys.argv[1:]))
