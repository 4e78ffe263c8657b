"""
Import packages on first use, say how to install what is missing, and hide remarks that do not concern a user's run.

Recipes and commands call `quiet` first; `trl_ext.ppo` and `trl_ext.dpo` call it when they are imported. `import
trl_ext`, callbacks and rewards hide nothing, so a script without our trainers prints the same as without trl_ext.
There is one exception: watches return no scores, so TRL logs None as their mean. Watches, and callbacks that write
completions, therefore hide transformers' remark that a tracker such as TensorBoard cannot log None.
"""

import functools
import logging
import os
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

OPTIONAL = {  # package -> what needs it, and what pip installs
    "deepspeed": ("ZeRO, `--accelerate_config zero2` or `zero3`", "deepspeed"),
    # Each vLLM so far asks for an older transformers than we do, which pip installs, or refuses to mix
    "vllm": ("generation by vLLM, `use_vllm: true`", "vllm==0.32.0 && pip install 'transformers>=5.23'"),
    "wandb": ("`report_to: wandb`", "wandb"),
    "tensorboard": ("`report_to: tensorboard`", "tensorboard"),
    "trackio": ("`report_to: trackio`", "trackio"),
    "matplotlib": ("curves in reports, `MonitoringPlotCallback`", "matplotlib"),
    "redis": ("`CachedReward` with `redis_url`", "'trl-ext[rewards]'"),
    "prometheus_client": ("`PrometheusCallback`, `trl-ext serve-reward`", "prometheus-client"),
    "starlette": ("`trl-ext serve-reward`", "'trl-ext[rewards]'"),
    "uvicorn": ("`trl-ext serve-reward`", "'trl-ext[rewards]'"),
}

# Logger → beginnings of its messages that say nothing of the run
REMARKS = {
    # bitsandbytes, imported by PEFT: a faster kernel for 4-bit weights on CPUs is not installed
    "bitsandbytes.backends.cpu.ops": ("Failed to load CPU gemm_4bit_forward",),
    # DeepSpeed, imported by accelerate and by TRL where it is installed, whether or not it is used
    "DeepSpeed": ("Setting accelerator to CPU", "Setting ds_accelerator to"),
    # vLLM, for each weight at each sync: a float32 policy generates in bfloat16. docs/vllm.md says this once
    "vllm.model_executor.models.utils": ("Attempted to load weight",),
    # transformers then deletes old checkpoints by the step in their name, which is what is wanted
    "transformers.trainer_utils": ("mtime may not be reliable",),
}
# The same for `warnings`: category, pattern of the message
WARNINGS: tuple[tuple[type[Warning], str], ...] = (
    # TRL asks a model by the old name, which transformers has changed
    (FutureWarning, r"`(is_)?gradient_checkpointing(_enable|_disable)?` is deprecated"),
    # DeepSpeed calls torch by old names, dozens of times a step
    (FutureWarning, r"`torch\.distributed\.\w+` is deprecated"),
)


def lazily(package: str, public: dict[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """
    Return `__getattr__`, `__dir__` and `__all__` of a package, so that its public names are imported on first use.

    Args:
        package: the package's `__name__`.
        public: maps modules, as in `from .module import`, to their public names, separated by spaces; a module that
            maps to its own name is public itself.
    """
    modules = {name: module for module, names in public.items() for name in names.split()}
    names = sorted(modules)

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; its names are {', '.join(names)}")
        module = import_module(modules[name], package)
        return module if modules[name] == f".{name}" else getattr(module, name)

    return load, lambda: names, names


def is_installed(package: str) -> bool:
    """Return whether a package is installed, without importing it; tensorboardX counts as tensorboard."""
    if package == "tensorboard" and find_spec("tensorboardX"):
        return True
    spec = find_spec(package)
    return bool(spec and spec.origin)  # a plain folder has no origin: W&B writes its runs to a folder `wandb`


def need(package: str, what: str) -> None:
    """
    Raise an `ImportError` if a package is not installed; the message has the command that installs it.

    Args:
        package: the package's name in `import`.
        what: what needs the package, as the beginning of the error's sentence.
    """
    if not is_installed(package):
        install = OPTIONAL[package][1] if package in OPTIONAL else package
        raise ImportError(f"{what} needs {package}, which is not installed: `pip install {install}`")


def _is_verbose() -> bool:
    return os.environ.get("TRL_EXT_VERBOSE", "") not in ("", "0")


@functools.cache  # once is enough
def quiet() -> None:
    """
    Hide the warnings of libraries that do not concern the run: those in `REMARKS` and `WARNINGS`.

    Call this first in a script, before libraries are imported. Other warnings, such as those of TRL and trl_ext, are
    still shown. With the environment variable `TRL_EXT_VERBOSE=1` nothing is hidden.
    """
    if _is_verbose():
        return
    for name, beginnings in REMARKS.items():
        logging.getLogger(name).addFilter(functools.partial(_is_for_users, beginnings))
    for category, pattern in WARNINGS:
        warnings.filterwarnings("ignore", pattern, category)


@functools.cache
def hide_none_logged() -> None:
    """
    Hide transformers' remark that a tracker such as TensorBoard cannot log None, unless `TRL_EXT_VERBOSE=1` is set.

    TRL logs None as the mean of a reward function that gives no scores.
    """
    if not _is_verbose():
        remark = ('Trainer is attempting to log a value of "None"',)
        logger = logging.getLogger("transformers.integrations.integration_utils")
        logger.addFilter(functools.partial(_is_for_users, remark))


def _is_for_users(beginnings: tuple[str, ...], record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(beginnings)
