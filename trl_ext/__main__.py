"""`python -m trl_ext` is `trl-ext`."""

import sys

from .commands.main import main

if __name__ == "__main__":
    sys.exit(main())
