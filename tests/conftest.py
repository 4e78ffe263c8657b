"""Set before anything imports transformers, datasets or wandb: they read these once, at import."""

import os
import re

import pytest
from xdist.scheduler import LoadScopeScheduling

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "disabled"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"  # tiny tensors: threads cost more than they save, and tests run side by side


class ByLaunch(LoadScopeScheduling):
    """One worker for all tests of a file, which share its fixtures, and of the same launch of several processes."""

    def _split_scope(self, nodeid):
        mode = re.search(r"\[(multi_gpu|fsdp2|zero2|zero3)", nodeid)
        return nodeid.split("::")[0] + (mode[0] if mode else "")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return ByLaunch(config, log)
