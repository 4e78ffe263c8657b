"""One process of a training command: the recipe, under the command's name. `accelerate launch` starts this file."""

import ctypes
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1  # of Linux' prctl

if __name__ == "__main__":
    if sys.platform == "linux":  # who kills `trl-ext` wants no run that goes on, and writes where the next one does
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    # Python puts a script's folder first, where a user's `import report` would look; the package's own may be missing
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).parent)] + [str(Path(__file__).parents[2])]

    from trl_ext.commands.main import run_here

    sys.exit(run_here(sys.argv[1], sys.argv[2:]))
