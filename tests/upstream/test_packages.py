"""Which warnings of other packages a recipe hides on the terminal, and which it must not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow  # each starts a process

SPEAKS = """
import logging, warnings
from trl_ext.upstream import quiet
quiet(); quiet()
logging.getLogger("bitsandbytes.backends.cpu.ops").warning("Failed to load CPU gemm_4bit_forward from %s", "x")
logging.getLogger("bitsandbytes.backends.cpu.ops").warning("your GPU is on fire")
warnings.warn("`is_gradient_checkpointing` is deprecated and will be removed", FutureWarning)
warnings.warn("`something_else` is deprecated", FutureWarning)
warnings.warn("the prompt was truncated", UserWarning)
from transformers.utils import logging as transformers_logging
transformers_logging.get_logger("transformers.trainer_utils").warning("mtime may not be reliable on this filesystem")
"""
LEFT_OUT = ("gemm_4bit", "is_gradient_checkpointing", "mtime")
SHOWN = ("your GPU is on fire", "something_else", "the prompt was truncated")


def said(code, **environment):
    env = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr
    return run.stderr


def test_remarks_are_hidden_and_warnings_are_not():
    text = said(SPEAKS, TRL_EXT_VERBOSE="0")
    assert [part for part in LEFT_OUT if part in text] == []
    assert [part for part in SHOWN if part not in text] == []


def test_without_our_trainers_log_levels_stay_and_verbose_shows_all():
    """`import trl_ext`, callbacks, rewards and TRL's trainers do not change what a user has set."""
    code = """
import logging, warnings
import trl_ext.callbacks, trl_ext.rewards, trl_ext.workbench.pages.report
[getattr(package, name) for package in (trl_ext.callbacks, trl_ext.rewards) for name in package.__all__]
from trl_ext.upstream import packages
assert not any(logging.getLogger(name).filters for name in packages.REMARKS)
ours = [f for f in warnings.filters if f[1] is not None and "gradient_checkpointing" in f[1].pattern]
assert not ours
assert not logging.getLogger("trl_ext").handlers and not logging.getLogger("trl_ext.callbacks.monitor").filters
"""
    text = said(code + SPEAKS, TRL_EXT_VERBOSE="1")
    assert [part for part in (*LEFT_OUT, *SHOWN) if part not in text] == []
