"""Two gloo processes in one launch, forked from one that has imported: that takes longer than most of what they do."""

import functools
import gc
import importlib
import importlib.metadata
import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import torch


def spare_time():
    """
    Keep accelerate from doing the same work at each training.

    It calls the garbage collector, which now skips what is imported. And it parses the metadata of packages hundreds
    of times, to know whether they are installed; now once.
    """
    importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
    gc.collect()
    gc.freeze()


def on_two_processes(module, folder, *arguments):
    """Run `module` with `arguments` and `folder` on two processes; what each saved as `folder/process <rank>.pt`."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.launch", module, *arguments, str(folder)],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-20000:]
    return [torch.load(folder / f"process {rank}.pt", weights_only=False) for rank in range(2)]


def main(module, *arguments):
    """Do what torchrun does, but import once: fork two processes that run `module`, and end both if one fails."""
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
            sys.argv = [module, *arguments]
            del sys.modules[module]  # it runs anew, as `__main__`
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
                os.kill(other, 9)
    sys.exit(failed)


if __name__ == "__main__":
    main(*sys.argv[1:])
