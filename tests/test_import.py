import subprocess
import sys

import pytest


@pytest.mark.slow
def test_optional_packages_are_imported_where_they_are_used():
    """TRL itself imports wandb, bitsandbytes and rich if they are installed."""
    code = """
import sys
sys.modules |= dict.fromkeys(["wandb", "bitsandbytes", "rich"])
import trl_ext, trl_ext.callbacks, trl_ext.workbench.pages.report, trl_ext.rewards
[getattr(package, name) for package in (trl_ext, trl_ext.callbacks, trl_ext.rewards) for name in package.__all__]
print(*{"matplotlib", "deepspeed", "prometheus_client", "vllm", "tensorboard"} & set(sys.modules), "are imported")
"""
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.splitlines()[-1].strip() == "are imported"
