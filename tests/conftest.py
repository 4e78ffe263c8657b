"""Set before anything imports transformers, datasets or wandb: they read these once, at import."""

import gc
import os
import re
import sys

import pytest
from xdist.scheduler import LoadScopeScheduling

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "disabled"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TQDM_DISABLE"] = "1"  # no progress bars of other libraries on the stderr that tests read
for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(name, None)  # tests read what is printed: no colours, and the width that they set
os.environ["OMP_NUM_THREADS"] = "1"  # tiny tensors: threads cost more than they save, and tests run in parallel
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # no test compiles; else bitsandbytes imports the compiler, for seconds
gc.disable()  # until all is imported: collecting garbage during imports takes two seconds


# The longest files run first, so that at the end no worker waits for another one's long file
LONGEST_FIRST = (
    *("distributed/test_sharded.py", "ppo/test_distributed.py", "callbacks/test_watch.py", "test_wheel.py"),
    *("callbacks/test_null.py", "callbacks/test_actions.py", "recipes/test_demo_stages.py", "ppo/test_agents.py"),
    *("test_docs.py", "test_notebook.py", "cli/test_main.py", "recipes/test_plan_recipe.py", "recipes/test_killed.py"),
    *("benchmarks/test_ppo_benchmark.py", "test_any_change.py", "upstream/test_packages.py", "ppo/test_resume.py"),
    *("dpo/test_distributed.py", "ppo/test_step_size.py", "ppo/test_ahead.py", "recipes/test_resuming.py"),
    *("ppo/test_fields.py", "dpo/test_trainer.py", "test_examples.py", "recipes/test_real_model_recipes.py"),
    *("models/test_adapter_switch.py", "runs/test_saving.py"),
)


def group(nodeid):
    """Return the group of tests that share fixtures: those of a file, or of one launch of processes in it."""
    mode = re.search(r"\[(multi_gpu|fsdp2|zero2|zero3)", nodeid)
    return nodeid.split("::")[0] + (mode[0] if mode else "")


@pytest.fixture
def token_rewards(monkeypatch):
    """The token rewards that GAE got, one tensor a rollout."""
    from trl_ext.ppo import trainer

    seen, estimate = [], trainer.advantages_and_returns

    def recording(rewards, *args):
        seen.append(rewards)
        return estimate(rewards, *args)

    monkeypatch.setattr(trainer, "advantages_and_returns", recording)
    return seen


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Leave out tests marked `extra` unless TRL_EXT_ALL_CASES is set, and run the longest files first."""
    if not os.environ.get("TRL_EXT_ALL_CASES"):
        extra = [item for item in items if item.get_closest_marker("extra")]
        config.hook.pytest_deselected(items=extra)
        items[:] = [item for item in items if not item.get_closest_marker("extra")]
    rank = {f"tests/{name}": number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: (rank.get(item.nodeid.split("::")[0], len(rank)), group(item.nodeid)))


def pytest_collection_finish(session):
    from tests.launch import spare_time

    spare_time()
    sys.dont_write_bytecode = True  # else a file that is written twice within a second is read from old bytecode


class ByLaunch(LoadScopeScheduling):
    """Gives each group to one worker."""

    def _split_scope(self, nodeid):
        return group(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return ByLaunch(config, log)
