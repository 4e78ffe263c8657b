"""Print what is installed, what is missing and how to install it, and the machine's hardware.

    trl-ext doctor

Each line begins with ok, note or PROBLEM. The exit status is 1 only if a line begins with PROBLEM.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..upstream.names import TESTED
from ..upstream.packages import OPTIONAL, is_installed

TESTED_TOO = {"torch": "2.13.0", "datasets": "5.2.0"}  # for information: a trainer compares names with TESTED's alone
Finding = tuple[str, str, str]  # "ok", "note" or "PROBLEM"; what; more about it


def main(arguments: list[str] | None = None) -> None:
    form = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser("trl-ext doctor", description=__doc__, formatter_class=form).parse_args(arguments)
    is_fit = True
    for verdict, what, text in (*versions(), *contract(), *machine(), *packages(), *places()):
        print(f"{verdict:<8}{what:<20}{text}", flush=True)
        is_fit &= verdict != "PROBLEM"
    if not is_fit:
        sys.exit(1)


def versions() -> Iterator[Finding]:
    number = ".".join(map(str, sys.version_info[:3]))
    yield "ok" if sys.version_info >= (3, 11) else "PROBLEM", "Python", f"{number}, 3.11 or newer is needed"
    for package, tested in {**TESTED, **TESTED_TOO}.items():
        try:
            installed = version(package)
        except PackageNotFoundError:
            yield "PROBLEM", package, f"is missing: `pip install {package}`"
            continue
        is_tested = installed.partition("+")[0] == tested
        yield "ok" if is_tested else "note", package, installed + ("" if is_tested else f", tested with {tested}")


def contract() -> Iterator[Finding]:
    from .contract import changes

    found = list(changes().values())
    changed = [change for change in found if change]
    if changed:
        more = "`python -m trl_ext.cli.contract` shows all"
        yield "PROBLEM", "contract with TRL", f"{len(changed)} of {len(found)} names changed: {changed[0]}; {more}"
    else:
        yield "ok", "contract with TRL", f"all {len(found)} names that trl_ext relies on are unchanged"


def machine() -> Iterator[Finding]:
    import psutil
    import torch

    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        bf16 = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no bf16: give `--bf16 false`"
        yield "ok", f"GPU {index}", f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, {bf16}"
    if not torch.accelerator.is_available():
        yield "note", "GPU", "none: the demo needs none; recipes for GPUs take `--use_cpu true --bf16 false`"
    memory = psutil.virtual_memory()
    free = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free"
    yield "ok", "cores, memory", f"{os.cpu_count()} cores, {free}"


def packages() -> Iterator[Finding]:
    for package, (purpose, install) in OPTIONAL.items():
        if not is_installed(package):
            yield "note", package, f"not installed, for {purpose}: `pip install {install}`"
        else:
            yield "ok", package, f"installed, for {purpose}"


def places() -> Iterator[Finding]:
    from huggingface_hub import constants, get_token

    cache = f"cache in {constants.HF_HUB_CACHE}"
    if constants.HF_HUB_OFFLINE:
        yield "note", "hub", f"HF_HUB_OFFLINE is set: only cached models and data can be used; {cache}"
    else:
        yield "ok", "hub", f"{'logged in' if get_token() else 'not logged in: `hf auth login`'}; {cache}"
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    yield "note" if free < 20 else "ok", "working directory", f"{Path.cwd()}, {free:.0f} GiB free"
