"""`python -m trl_ext` is the command `trl-ext`. `accelerate launch` runs this file as one process of a training."""

import signal
import sys
import time
from pathlib import Path
from typing import Any


def begin() -> None:
    """
    Prepare a training process: it ends when `trl-ext` ends (on Linux only), one Ctrl-C interrupts it only once, and it
    can import `trl_ext`.
    """
    if sys.platform == "linux":  # the next run may write to the same folder
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    last = -1.0  # seconds

    def interrupt(number: int, frame: Any) -> None:
        # A terminal sends Ctrl-C both to this process and to `trl-ext`, which passes it on to this process
        nonlocal last
        if time.monotonic() - last > 1:
            last = time.monotonic()
            signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    # Python puts a script's folder first, where a user's `import data` would look; the package's own may be missing
    here = Path(__file__).parent
    sys.path[:] = [path for path in sys.path if path != str(here)] + [str(here.parent)]


if __name__ == "__main__":
    if __package__:
        from .cli.main import main

        sys.exit(main())
    begin()
    from trl_ext.cli.main import run_here

    sys.exit(run_here(sys.argv[1], sys.argv[2:]))
