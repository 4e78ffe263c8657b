"""What a recipe's terminal leaves out, and what it must not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow  # each starts a process

SPEAKS = """
import logging, sys, warnings
from trl_ext.upstream.terminal import is_quiet, late_bars, quiet
assert not is_quiet()
quiet(); quiet()
assert is_quiet()
late_bars()
logging.getLogger("bitsandbytes.backends.cpu.ops").warning("Failed to load CPU gemm_4bit_forward from %s", "x")
logging.getLogger("bitsandbytes.backends.cpu.ops").warning("your GPU is on fire")
warnings.warn("`is_gradient_checkpointing` is deprecated and will be removed", FutureWarning)
warnings.warn("`something_else` is deprecated", FutureWarning)
warnings.warn("the prompt was truncated", UserWarning)
from transformers.utils import logging as transformers_logging
transformers_logging.get_logger("transformers.trainer_utils").warning("mtime may not be reliable on this filesystem")
import tempfile, time
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM
shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
with tempfile.TemporaryDirectory() as folder:
    LlamaForCausalLM(LlamaConfig(vocab_size=8, **shape)).save_pretrained(folder)
    for bias in (False, True):  # where it is set, more than the head is new
        AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, attention_bias=bias)
from datasets import Dataset
rows = Dataset.from_dict({"n": [1, 2]})
rows.map(lambda row: row, desc="fast")
for _ in transformers_logging.tqdm(range(2), desc="Loading weights"):
    pass
from trl_ext.upstream import terminal
if sys.argv[1:]:
    rows.map(lambda row: time.sleep(terminal.SECONDS * (row["n"] > 1)) or row, desc="slow", load_from_cache_file=False)
"""
LEFT_OUT = ("gemm_4bit", "is_gradient_checkpointing", "mtime", "fast", "Loading weights")
SHOWN = ("your GPU is on fire", "something_else", "the prompt was truncated", "q_proj.bias")


def said(code, *arguments, **environment):
    env = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr
    return run.stderr


def test_remarks_are_left_out_and_warnings_are_not():
    text = said(SPEAKS, "slow", TRL_EXT_VERBOSE="0")
    assert [part for part in LEFT_OUT if part in text] == []
    assert [part for part in SHOWN if part not in text] == []
    assert "slow" in text  # what takes long has a bar
    assert text.count("LOAD REPORT") == 1


def test_who_has_none_of_our_trainers_keeps_what_is_set_and_verbose_shows_all():
    """Neither `import trl_ext` nor callbacks, rewards and TRL's own trainers touch what a user has set."""
    code = """
import logging, warnings
import trl_ext.callbacks, trl_ext.rewards, trl_ext.workbench.pages.report
[getattr(package, name) for package in (trl_ext.callbacks, trl_ext.rewards) for name in package.__all__]
from datasets.utils import tqdm
from trl_ext.upstream import terminal
from transformers.utils import logging as hf
assert not any(logging.getLogger(name).filters for name in terminal.REMARKS)
ours = [f for f in warnings.filters if f[1] is not None and "gradient_checkpointing" in f[1].pattern]
assert not ours and hf._tqdm_hook is None and tqdm.__init__.__name__ == "__init__"
assert not logging.getLogger("trl_ext").handlers and not logging.getLogger("trl_ext.callbacks.monitor").filters
"""
    text = said(code + SPEAKS, TRL_EXT_VERBOSE="1")
    assert [part for part in (*LEFT_OUT, *SHOWN) if part not in text] == []
