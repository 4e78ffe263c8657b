"""Two gloo processes in one launch: importing takes longer than most of what they check."""

import functools
import gc
import importlib.metadata
import os
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
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", module]
    run = subprocess.run(
        [sys.executable, *command, *arguments, str(folder)],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-20000:]
    return [torch.load(folder / f"process {rank}.pt", weights_only=False) for rank in range(2)]
