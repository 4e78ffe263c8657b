"""Run a recipe in one process of a training command. `accelerate launch` starts this file."""

import ctypes
import signal
import sys
import time
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1  # of Linux' prctl
_ONCE = 1.0  # seconds


def interrupt_once() -> None:
    """
    Count several SIGINTs within a second as one.

    A terminal sends Ctrl-C both to this process and to `trl-ext`, which passes it on to this process.
    """
    last = -_ONCE

    def interrupt(number: int, frame: Any) -> None:
        nonlocal last
        if time.monotonic() - last > _ONCE:
            last = time.monotonic()
            signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, interrupt)


if __name__ == "__main__":
    if sys.platform == "linux":  # end with `trl-ext`: the next run may write to the same folder
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    interrupt_once()
    # Python puts a script's folder first, where a user's `import report` would look; the package's own may be missing
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).parent)] + [str(Path(__file__).parents[2])]

    from trl_ext.cli.main import run_here

    sys.exit(run_here(sys.argv[1], sys.argv[2:]))
